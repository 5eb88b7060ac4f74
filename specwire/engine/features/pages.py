"""Features as one more paged layer for each head, written by the passes that write keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specwire.engine.features.device import share_pages
from specwire.engine.features.pool import FeaturePool, PoolLayout, PoolSet
from specwire.engine.heads.source import FINAL_LAYER, FeatureSource
from specwire.engine.models.config import ModelConfig
from specwire.errors import InvalidArgumentError


class Taps:
    """Hidden states that one pass leaves behind at the layers that some head reads.

    Args:
        layer_ids: those layers, as `FeatureSource` counts them.
        dtype: of what is kept; the target's.
    """

    def __init__(self, layer_ids: frozenset[int], dtype: torch.dtype) -> None:
        self.layer_ids = layer_ids
        self.states: dict[int, torch.Tensor] = {}
        self._dtype = dtype

    def take(self, layer_id: int, state: torch.Tensor) -> None:
        """Keeps a copy of the state [T, hidden_size] if it is wanted; the pass may go on writing it."""
        if layer_id in self.layer_ids:
            self.states[layer_id] = state.to(self._dtype, copy=True)


@dataclass(frozen=True, slots=True, eq=False)
class HeadPages:
    """The features that one head reads."""

    source: FeatureSource
    pages: torch.Tensor  # [num_blocks + 1, block_size, width] in source.dtype; the last block is for padding

    @property
    def bytes_per_token(self) -> int:
        return self.source.width * self.source.dtype.itemsize

    def write(self, states: dict[int, torch.Tensor], slot_mapping: torch.Tensor) -> None:
        """Stores the features of T tokens at the slots [T] (block * block_size + offset). states: [T, hidden_size] by layer id."""
        features = project(self.source, [states[layer_id] for layer_id in self.source.layer_ids])
        self.pages.view(-1, self.source.width).index_copy_(0, slot_mapping, features)


class FeaturePages:
    """The features of all heads, on the model's device. Whoever reads a block must know that it was written, as with keys and values.

    Args:
        sources: of the heads, of different hashes.
        config: the target's.
        num_blocks, block_size: of the KV cache, whose block tables hold here, too.
        dtype: the target's.
        device: the target's.
        pool: memory for them that other processes can read, on a CPU; None = nobody's but ours.

    Raises:
        InvalidArgumentError: a head is none for this target.
    """

    def __init__(
        self,
        sources: Sequence[FeatureSource],
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        pool: FeaturePool | None = None,
    ) -> None:
        assert len({source.hash for source in sources}) == len(sources), f"heads of equal features: {[source.name for source in sources]}"
        self.heads: list[HeadPages] = []
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = pool
        self._dtype = dtype
        for source in sources:
            check_source(source, config)
            shape = (num_blocks + 1, block_size, source.width)
            if pool is None:
                pages = torch.zeros(shape, dtype=source.dtype, device=device)
            else:
                pages = torch.frombuffer(pool.pages(source.hash), dtype=source.dtype).view(shape)
            self.heads.append(HeadPages(_on_device(source, device), pages))
        self._layer_ids = frozenset(layer_id for source in sources for layer_id in source.layer_ids)

    def share(self, max_num_seqs: int) -> None:
        """Lets other processes read pages on a GPU, too.

        Raises:
            UnavailableError: they can't be shared.
        """
        assert self.pool is None, f"the pages are shared already, as {self.pool.name}"
        sets = [PoolSet(head.source.hash, head.bytes_per_token, share_pages(head.pages)) for head in self.heads]
        self.pool = FeaturePool.create(PoolLayout.make(max_num_seqs, self.num_blocks, self.block_size, sets))

    @property
    def num_bytes(self) -> int:
        """Of all pages."""
        return sum(head.pages.nbytes for head in self.heads)

    def taps(self) -> Taps:
        """For one pass."""
        return Taps(self._layer_ids, self._dtype)

    def write(self, taps: Taps, slot_mapping: torch.Tensor) -> None:
        """Stores what a pass over T tokens has left, at their slots [T]."""
        for head in self.heads:
            head.write(taps.states, slot_mapping)


def make_pool(sources: Sequence[FeatureSource], max_num_seqs: int, num_blocks: int, block_size: int = 16) -> FeaturePool:
    """Shared memory for the features of a KV cache of so many blocks."""
    sets = [PoolSet(source.hash, source.width * source.dtype.itemsize) for source in sources]
    return FeaturePool.create(PoolLayout.make(max_num_seqs, num_blocks, block_size, sets))


def project(source: FeatureSource, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Features [T, width] of T tokens from their hidden states [T, hidden_size], one a layer id."""
    norms = source.norms or ()
    per_layer = len(norms) == len(states)
    if per_layer:
        states = [_normed(state, norm, source.norm_eps) for state, norm in zip(states, norms, strict=True)]
    features = states[0] if len(states) == 1 else torch.cat(tuple(states), -1)
    if norms and not per_layer:
        features = _normed(features, norms[0], source.norm_eps)
    if source.projection is not None:
        features = F.linear(features.to(source.projection.dtype), source.projection)
    return features.to(source.dtype)


def check_source(source: FeatureSource, config: ModelConfig) -> None:
    """Raises InvalidArgumentError unless the head can read a model of this shape; naming both."""
    for layer_id in source.layer_ids:
        if layer_id != FINAL_LAYER and not 0 <= layer_id <= config.num_layers:
            raise InvalidArgumentError(
                f"the head {source.name} reads the target's layer {layer_id}, but the target has {config.num_layers}; use a head made for it"
            )
    wide = len(source.layer_ids) * config.hidden_size
    inputs, outputs = (wide, wide) if source.projection is None else (source.projection.shape[1], source.projection.shape[0])
    if not source.layer_ids or (inputs, outputs) != (wide, source.width):
        raise InvalidArgumentError(
            f"the head {source.name} reads {inputs} numbers a token, makes {outputs}, and says {source.width}, but the "
            f"{len(source.layer_ids)} layers of the target that it names have {wide}; use a head made for it"
        )
    widths = [len(norm) for norm in source.norms or ()]
    if widths not in ([], [config.hidden_size] * len(source.layer_ids), [wide]):
        raise InvalidArgumentError(
            f"the head {source.name} has norms of widths {widths}, but {len(source.layer_ids)} layers of {config.hidden_size}; use a head made for it"
        )


def feature_bytes(sources: Sequence[FeatureSource], block_size: int) -> int:
    """Memory of one block over all heads."""
    return sum(source.width * source.dtype.itemsize for source in sources) * block_size


def _normed(state: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(state.float(), (len(norm),), norm.float(), eps).to(state.dtype)


def _on_device(source: FeatureSource, device: torch.device | str) -> FeatureSource:
    return FeatureSource(
        source.name,
        source.layer_ids,
        None if source.projection is None else source.projection.to(device),
        source.width,
        source.dtype,
        source.hash,
        None if source.norms is None else tuple(norm.to(device) for norm in source.norms),
        source.norm_eps,
    )
