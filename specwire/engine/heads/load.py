"""From a folder to a head that drafts."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specwire.engine.heads.block import BlockHead
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.dflash import dflash_head
from specwire.engine.heads.dspark import TOP_K, dspark_head
from specwire.engine.heads.eagle import EagleHead
from specwire.engine.heads.eagle3 import Eagle3Head
from specwire.engine.heads.features import check_method, source_of
from specwire.engine.heads.kinds import open_head
from specwire.engine.heads.mtp import MtpHead
from specwire.engine.heads.source import FeatureSource
from specwire.engine.heads.tensors import TILES, HeadReader
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import CUDA_HEAD_DIMS, parse_dtype
from specwire.engine.models.weights import FORMAT_DTYPES, WeightsRequest, check_weights, uses_tiles
from specwire.errors import UnsupportedError

logger = logging.getLogger(__name__)

Head = EagleHead | Eagle3Head | MtpHead | BlockHead


class _MakeHead(Protocol):
    def __call__(self, reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> Head: ...


_TILE = 32
"""What the width of a layer in tiles is a multiple of."""
_TILE_FEATURES = 16
_HEADS: dict[str, _MakeHead] = {"eagle": EagleHead, "eagle3": Eagle3Head, "mtp": MtpHead, "dflash": dflash_head, "dspark": dspark_head}


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head and what there is to know of it."""

    head: Head
    config: HeadConfig
    source: FeatureSource
    dtype: torch.dtype
    device: torch.device
    weights_hash: str
    max_model_len: int
    """Tokens that a sequence may reach."""
    is_tiled: bool = False
    """All of its weights have 8 bits, as compiled passes on a CPU read them."""


def load_head(
    folder: Path,
    method: str,
    *,
    target: Path | None = None,
    max_model_len: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    weights: str = "auto",
    draft_top_k: int | None = None,
) -> LoadedHead:
    """Loads a head.

    Args:
        folder: of the checkpoint.
        method: that it must be for.
        target: the target's folder: its size and vocabulary are compared with the head's, and it gives what they share.
        max_model_len: tokens that a sequence may reach; None = as many as the target takes, or, without one, as the head's file says.
        dtype: auto (bfloat16), float32 or bfloat16.
        weights: of the linear layers, on a CPU: auto, int8, bf16 or fp32; auto takes bf16, and where the CPU is made for it 8 bits: for the
            output layer, and for all of them where drafts are computed by compiled code (eagle3).
        draft_top_k: for dspark, instead of what the checkpoint says: ids of the highest logits that the bias re-ranks.

    Raises:
        SpecwireError: the folder holds no head for this method and target, or the numbers asked for are not built.
    """
    check_weights(WeightsRequest(weights, None if dtype == "auto" else parse_dtype(dtype)), device)
    if weights == "int4":
        raise UnsupportedError("weights int4 is not built for draft heads; take int8, bf16 or fp32, or leave weights at auto")
    config, tensors = open_head(folder)
    check_method(config, method)
    if draft_top_k is not None:
        config = dataclasses.replace(config, options={**config.options, TOP_K: draft_top_k})
    if device != "cpu" and config.layers.head_dim not in CUDA_HEAD_DIMS:
        built = ", ".join(map(str, CUDA_HEAD_DIMS))
        raise UnsupportedError(
            f"the head's head_dim is {config.layers.head_dim}, but on CUDA only {built} are built; use device cpu, or another head"
        )
    shape = None
    if target is not None:
        shape = ModelConfig.from_folder(target)
        config.check_target(shape)
    number = FORMAT_DTYPES[weights] if weights != "auto" else torch.bfloat16 if dtype == "auto" else parse_dtype(dtype)
    place = torch.device(device)
    limit = max_model_len or (shape or config.layers).max_position_embeddings
    # Nobody has asked for exact numbers, and drafts need none; the output layer is most of a head's work. In tiles it takes the least time.
    may_round = weights == dtype == "auto" and place.type == "cpu" and config.layers.hidden_size % _TILE == 0
    is_tiled = may_round and method == "eagle3" and uses_tiles("int4") and _fits_tiles(config.layers)
    if may_round and method == "eagle3" and not is_tiled:
        reason = "its widths are no multiples of 32" if uses_tiles("int4") else "this CPU has no 512-bit integer dot products (AVX-512 VNNI)"
        logger.info("the head %s is computed in bfloat16 by torch, not in 8 bits by compiled passes: %s", config.name, reason)
    own = TILES if is_tiled else "" if weights == "auto" else weights
    output_weights = "int4" if may_round else weights
    reader = HeadReader(tensors, config.layers, number, place, weights=own, output_weights=output_weights, is_narrowed=is_tiled)
    head = _HEADS[method](reader, config, target, limit)
    return LoadedHead(head, config, source_of(config, tensors, shape), number, place, tensors.hash, limit, is_tiled=is_tiled)


def _fits_tiles(shape: ModelConfig) -> bool:
    """Whether all products read whole groups and give whole blocks of features."""
    return not (shape.head_dim % _TILE_FEATURES or shape.intermediate_size % _TILE or shape.num_heads * shape.head_dim % _TILE)
