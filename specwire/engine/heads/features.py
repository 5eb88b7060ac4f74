"""What a head's folder says of its features: for the verifier, which computes them."""

import hashlib
from pathlib import Path

import torch

from specwire.draft_checkpoint import HEAD_METHODS
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.eagle3 import fusion
from specwire.engine.heads.kinds import open_head
from specwire.engine.heads.source import FeatureSource
from specwire.engine.heads.tensors import HeadTensors
from specwire.engine.models.config import ModelConfig
from specwire.errors import InvalidArgumentError


def feature_source(folder: Path, target: ModelConfig | None = None) -> FeatureSource:
    """The features that the head of a folder reads.

    Args:
        target: the model that they are taken from. Needed where the head's file names no layers; it must be the one that the head is made for.

    Raises:
        SpecwireError: no head, one of a kind that is not built, or one made for another target.
    """
    config, tensors = open_head(folder)
    if config.method not in HEAD_METHODS:
        raise InvalidArgumentError(f"{folder} holds a whole model, not a draft head, and only heads read features; name a head's folder")
    if target is not None:
        config.check_target(target)
    return source_of(config, tensors, target)


def source_of(config: HeadConfig, tensors: HeadTensors, target: ModelConfig | None) -> FeatureSource:
    """As `feature_source`, of a folder that is open already."""
    layer_ids = config.layer_ids_of(target)
    projection, norms = None, None
    if config.method in ("eagle3", "dflash", "dspark"):
        projection, norms = fusion(config, tensors, len(layer_ids))
        width, dtype = config.layers.hidden_size, projection.dtype
    else:
        width, dtype = config.target_hidden_size * len(layer_ids), tensors.dtype
    digest = hashlib.sha256(f"{layer_ids} {width} {dtype} {config.layers.rms_norm_eps if norms else 0}".encode())
    for tensor in (*(norms or ()), *([projection] if projection is not None else [])):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return FeatureSource(Path(config.name).name, layer_ids, projection, width, dtype, digest.hexdigest(), norms, config.layers.rms_norm_eps)


def check_method(config: HeadConfig, method: str) -> None:
    """Raise InvalidArgumentError, naming both, unless a folder holds a head for the method."""
    if config.method != method:
        raise InvalidArgumentError(
            f"{config.name} is a checkpoint for method {config.method}, but method is {method}; "
            f"set method to {config.method}, or name a model for {method}"
        )
