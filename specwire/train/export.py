"""Writes a trained head as a checkpoint in the format of the speculators library, with a model card."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from specwire.train.card import model_card
from specwire.train.data import DataConfig, Sequences
from specwire.train.evaluate import Evaluation
from specwire.train.heads import mask_token_id
from specwire.train.recipe import Recipe
from specwire.train.sampled import Sampled
from specwire.train.target import Target

_SHARD_BYTES = 15 << 20
"""Most bytes of a file, unless one tensor alone is larger: repositories refuse or warn of larger files."""
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True)
class Trained:
    """What is exported, and how it came about."""

    recipe: Recipe
    data: DataConfig
    target_name: str
    feature_layers: tuple[int, ...]
    draft_ids: np.ndarray | None
    sequences: Sequences
    evaluation: Evaluation
    sampled: Sampled
    num_steps: int
    seconds: float


def export(folder: Path, tensors: Mapping[str, torch.Tensor], target: Target, trained: Trained) -> None:
    """Writes config.json, safetensors in bfloat16, evaluation.json and README.md; a folder that was there is replaced.

    Embedding and output layer are the target's and not saved; of a smaller vocabulary d2t says which ids it has.

    Args:
        tensors: the head's state.
    """
    scratch = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    saved = {name: tensor.detach().cpu().to(torch.bfloat16).contiguous() for name, tensor in _folded(tensors).items()}
    if trained.draft_ids is not None:
        ids = torch.from_numpy(trained.draft_ids)
        saved["d2t"] = ids - torch.arange(len(ids))
        saved["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).scatter_(0, ids, torch.ones_like(ids, dtype=torch.bool))
    num_bytes = _save_shards(scratch, saved)
    _write_json(scratch / "config.json", head_config(target, trained))
    _write_json(scratch / "evaluation.json", trained.evaluation.to_dict() | trained.sampled.to_dict())
    num_parameters = sum(tensor.numel() for name, tensor in saved.items() if name not in ("d2t", "t2d"))
    (scratch / "README.md").write_text(model_card(trained, num_parameters, num_bytes), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)


def head_config(target: Target, trained: Trained) -> dict[str, Any]:
    """The content of config.json."""
    recipe, method = trained.recipe, trained.recipe.method
    raw = json.loads((target.folder / "config.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if method == "eagle3" else "DSparkSpeculator"],
        "speculators_model_type": method,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": recipe.num_draft_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": trained.target_name, "architectures": raw.get("architectures") or []},
        },
        "transformer_layer_config": _layer_config(raw, target, recipe),
        "draft_vocab_size": target.config.vocab_size if trained.draft_ids is None else len(trained.draft_ids),
        "target_hidden_size": target.config.hidden_size,
        "dtype": "bfloat16",
        "confidence_calibration": {
            "input": "log_odds",
            "weights_by_position": trained.evaluation.calibration,
            "sampled": [{"temperature": fit.temperature, "weights_by_position": fit.weights_by_position} for fit in trained.sampled.fits],
        },
        "draft_sharpness": trained.sampled.sharpness,
    }
    if method == "eagle3":
        return config | {
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": True,
            "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": list(trained.feature_layers),
        }
    return config | {
        "aux_hidden_state_layer_ids": list(trained.feature_layers),
        "block_size": recipe.num_draft_tokens,
        "mask_token_id": mask_token_id(target),
        "sample_from_anchor": True,
        "markov_rank": recipe.markov_rank,
        "markov_head_type": "vanilla",
        "dspark_draft_topk": min(recipe.rerank, target.config.vocab_size if trained.draft_ids is None else len(trained.draft_ids)),
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


def _layer_config(raw: Mapping[str, Any], target: Target, recipe: Recipe) -> dict[str, Any]:
    """The head's layers as an ordinary model's configuration: Qwen 3's where queries and keys are normalised, else Llama's."""
    config = target.config
    is_qwen = recipe.method == "dspark" or config.qk_norm
    return {
        "model_type": "qwen3" if is_qwen else "llama",
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **{key: raw[key] for key in _ROPE_KEYS if raw.get(key) is not None},
    }


def _folded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the scale of the features, which goes into the projection: the format has no place for it."""
    folded = dict(tensors)
    scale = folded.pop("feature_scale", None)
    if scale is not None:
        weight = folded["fc.weight"]
        folded["fc.weight"] = (weight.unflatten(1, (len(scale), -1)) * scale[:, None]).flatten(1)
    return folded


def _save_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Writes model.safetensors, or several files with an index. Returns the bytes of all tensors."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
        total += num_bytes
    if len(shards) == 1:
        _save(shards[0], folder / "model.safetensors")
        return total
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, folder / file)
        files |= dict.fromkeys(shard, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    return total


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library's files are for their owner alone; a service may run as somebody else


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
