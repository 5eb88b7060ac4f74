"""What drafting methods see of a head, and the layers that all heads have."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from specwire.engine.batch import RaggedBatch
from specwire.engine.heads.device import DevicePass, DeviceTables, HeadStates
from specwire.engine.heads.vocabulary import Vocabulary
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.layer import LayerMath, LayerWeights, RmsNorm, Rotation


class SequentialHead(Protocol):
    """A head that drafts token by token. Row i of a sequence is feature f_i beside token x_(i+1), at position i; it predicts x_(i+2).

    Behind the features of the target it goes on with its own: what `carry` makes of a row stands for the feature of the next.
    """

    vocabulary: Vocabulary
    tables: DeviceTables

    def run(self, features: torch.Tensor, on: DevicePass) -> HeadStates:
        """As `forward`, `output` and `carry` of all rows, on the kernels of a device. features: [T, width] in the head's dtype, unchanged."""
        ...

    def forward(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        """Writes KV of rows whose tokens are the batch's, with features [T, width]; returns the residual stream behind the last layer,
        float32 [T, hidden_size]."""
        ...

    def output(self, residual: torch.Tensor) -> torch.Tensor:
        """Rows [R, hidden_size] of the residual stream as the vocabulary's head reads them."""
        ...

    def carry(self, residual: torch.Tensor) -> torch.Tensor:
        """Rows [R, hidden_size] of the residual stream as features of the rows that follow them."""
        ...


class Candidates(NamedTuple):
    """Ids that may be drafted in each row."""

    columns: torch.Tensor | None  # [R, m] int64, of the head's output; None = all of them
    logits: torch.Tensor  # [R, m] float32


class MarkovHead(Protocol):
    """What a draft's logits gain by the token before it."""

    def candidates(self, logits: torch.Tensor) -> Candidates:
        """Which of logits [R, draft_vocab_size] are looked at."""
        ...

    def biased(self, candidates: Candidates, previous: torch.Tensor) -> torch.Tensor:
        """The candidates' logits [R, m] for rows that follow the target's ids previous [R]."""
        ...


class ConfidenceHead(Protocol):
    """How likely a draft is to be accepted, once those before it are."""

    def __call__(self, hidden: torch.Tensor, previous: torch.Tensor, position: int) -> torch.Tensor:
        """Probabilities [R] of rows [R, hidden_size] that follow the target's ids previous [R]; position counts drafts from 0."""
        ...


class BlockHead(Protocol):
    """A head that drafts a block in one pass: an anchor (the last known token) and mask tokens, over KV made of the target's features.

    Slot i of the KV belongs to f_i at position i. The anchor x_(n-1) stands at position n - 1.
    """

    vocabulary: Vocabulary
    mask_token_id: int
    num_queries: int
    """Tokens of a block: the anchor and masks."""
    first_draft: int
    """The block's row that predicts the first draft: 0 if the anchor does, 1 if the first mask does."""
    is_causal: bool
    """Whether a block's tokens see only those before them in the block."""

    @property
    def markov(self) -> MarkovHead | None:
        """Bias of a draft by the one before it."""
        ...

    @property
    def confidence(self) -> ConfidenceHead | None:
        """What gives the drafts' scores; None = their probabilities do."""
        ...

    def write_context(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> None:
        """Writes KV of features [T, width] at the batch's positions."""
        ...

    def forward(self, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        """Blocks' rows after the final norm, [T, hidden_size]; their KV is of no use afterwards."""
        ...

    @property
    def tables(self) -> DeviceTables:
        """Of the layers."""
        ...

    def write_context_on(self, features: torch.Tensor, on: DevicePass) -> None:
        """As `write_context`, on the kernels of a device. features: [T, width] in the head's dtype, unchanged."""
        ...

    def run(self, on: DevicePass) -> torch.Tensor:
        """As `forward`, on the kernels of a device, in the head's dtype."""
        ...


class Layers:
    """Decoder layers as a target has them.

    Args:
        math: of their shape.
        layers: at least one.
        config: their shape.
        dtype: of the weights.
        first: index of the first one's KV.
    """

    def __init__(self, math: LayerMath, layers: Sequence[LayerWeights], config: ModelConfig, dtype: torch.dtype, first: int = 0) -> None:
        self._math = math
        self._first = first
        eps = config.rms_norm_eps
        self._layers = [(layer, RmsNorm(layer.input_norm, eps, dtype), RmsNorm(layer.post_norm, eps, dtype)) for layer in layers]

    def run(self, residual: torch.Tensor, rotation: Rotation, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        """Adds to the residual stream, float32 [T, hidden_size], in place, and returns it."""
        for (layer, input_norm, post_norm), layer_kv in zip(self._layers, kv_cache.layers[self._first :], strict=True):
            residual += self._math.attend(layer, input_norm(residual), rotation, batch, layer_kv)
            residual += self._math.feed_forward(layer, post_norm(residual))
        return residual
