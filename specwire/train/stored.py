"""A head's checkpoint back as a module, to be evaluated: only those that `specwire.train.export` writes."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from specwire.engine.heads.calibration import LogisticCalibration, read_calibration
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.sharpness import read_sharpness
from specwire.errors import FailedPreconditionError
from specwire.train.heads import Head, make_head
from specwire.train.recipe import METHODS, Recipe
from specwire.train.target import Target
from specwire.train.tensors import read_all


@dataclass(frozen=True, slots=True)
class Stored:
    """A head and how it is used."""

    head: Head
    method: str
    num_drafts: int  # most that it makes at once
    feature_layers: tuple[int, ...]
    calibration: list[list[float]]  # (weight of the log-odds, bias) by position, of greedy answers
    scores: LogisticCalibration  # at all temperatures
    sharpness: float = 1.0  # see `specwire.train.sampled.Sampled`


def load_stored(folder: Path, target: Target) -> Stored:
    """Loads the head in float32 on the target's device; its numbers are those of the file, bfloat16.

    Raises:
        FailedPreconditionError: the folder's head is of another kind or size.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    method, layers = config.get("speculators_model_type"), config["transformer_layer_config"]
    if method not in METHODS or layers["hidden_size"] != target.config.hidden_size:
        raise FailedPreconditionError(
            f"{folder} holds a head of method {method} and width {layers['hidden_size']}; only {', '.join(METHODS)} of {target.config.hidden_size} "
            "can be evaluated: use one that `specwire train` made for this model"
        )
    [proposal] = config["speculators_config"]["proposal_methods"]
    is_block = method == "dspark"
    recipe = Recipe(
        method,
        num_layers=layers["num_hidden_layers"],
        num_draft_tokens=proposal["speculative_tokens"],
        **({"markov_rank": config["markov_rank"], "rerank": config["dspark_draft_topk"]} if is_block else {}),
    )
    tensors = read_all(folder)
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    draft_ids = None if offsets is None else (offsets + torch.arange(len(offsets))).to(target.device)
    feature_layers = tuple(config["aux_hidden_state_layer_ids" if is_block else "eagle_aux_hidden_state_layer_ids"])
    module = make_head(recipe, target, len(feature_layers), draft_ids)
    assert isinstance(module, Head), f"{type(module).__name__} lacks a part of the head's protocol"
    missing, unknown = module.load_state_dict(tensors, strict=False)
    # The scale of the features is in the projection.
    if unknown or set(missing) - {"feature_scale"}:
        raise FailedPreconditionError(f"{folder}: the head lacks {', '.join(missing) or 'nothing'} and has {', '.join(unknown) or 'nothing'} beyond")
    head_config = HeadConfig.from_folder(folder)
    scores = read_calibration(head_config)
    assert scores is not None, f"{folder} has no fit of its scores"
    return Stored(
        module,
        method,
        recipe.num_draft_tokens,
        feature_layers,
        config["confidence_calibration"]["weights_by_position"],
        scores,
        read_sharpness(head_config),
    )
