"""Heads that draft a block in one pass: mask tokens behind the last known one, over KV injected from the target's hidden states."""

import pickle
from pathlib import Path

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.device import DevicePass, DeviceTables
from specwire.engine.heads.head import Layers
from specwire.engine.heads.markov import Confidence, Markov
from specwire.engine.heads.tensors import HeadReader
from specwire.engine.heads.vocabulary import read_vocabulary
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.layer import LayerMath, RmsNorm
from specwire.errors import InvalidArgumentError, UnsupportedError

_DEFAULT_BLOCK = 8
_MASK_FILE = "mask_embedding.pt"


class BlockHead:
    """A head that drafts a block in one pass: an anchor (the last known token) and mask tokens, over KV made of the target's features.

    Slot i of the KV belongs to f_i at position i. The anchor x_(n-1) stands at position n - 1.

    Args:
        reader: the checkpoint.
        config: its description.
        target: the target's folder, for what the head shares with it.
        num_positions: tokens that a sequence may reach; a block may reach past them.
        first_draft: the block's row that predicts the first draft: 0 if the anchor does, 1 if the first mask does.
        markov: bias of a draft by the one before it.
        confidence: what gives the drafts' scores; None = their probabilities do.

    Attributes:
        num_queries: tokens of a block: the anchor and masks.
        is_causal: whether a block's tokens see only those before them in the block.
        tables: of the layers.

    Raises:
        SpecwireError: a description or a tensor that can't be used.
    """

    def __init__(
        self, reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int, *, first_draft: int,
        markov: Markov | None = None, confidence: Confidence | None = None,
    ) -> None:  # fmt: skip
        _refuse_windows(config)
        if "mask_hidden" in reader.tensors:
            raise UnsupportedError(f"{config.name} has a tensor mask_hidden, which {config.method} has no use for; use a head of this method")
        self.vocabulary = read_vocabulary(reader, config, target)
        self.num_queries, self.mask_token_id = _block_size(config), _mask_token_id(config)
        self.is_causal = config.flag("causal")
        self.first_draft, self.markov, self.confidence = first_draft, markov, confidence
        shape, eps = config.layers, config.layers.rms_norm_eps
        hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        self._math = LayerMath(shape, reader.dtype, reader.device, num_positions + self.num_queries)
        prefixes = [f"layers.{i}" for i in range(shape.num_layers)]
        self._weights = [reader.layer(prefix) for prefix in prefixes]
        self._key_values = [
            reader.linear([f"{prefix}.self_attn.{part}_proj" for part in "kv"], (kv, kv), hidden, has_bias=shape.qkv_bias) for prefix in prefixes
        ]
        self.tables = DeviceTables(self._math, shape, reader.dtype)
        self._context_weight, self._norm_weight = reader.single("hidden_norm.weight", hidden), reader.single("norm.weight", hidden)
        self._layers = Layers(self._math, self._weights, shape, reader.dtype)
        self._context_norm = RmsNorm(self._context_weight, eps, reader.dtype)
        self._norm = RmsNorm(self._norm_weight, eps, reader.dtype)
        self._mask_embedding = _read_mask_embedding(reader, config, self.mask_token_id)

    def write_context(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> None:
        """Writes KV of features [T, width] at the batch's positions."""
        rotation = self._math.rotation(batch.positions)
        normed = self._context_norm(features.float())
        for layer, key_value, layer_kv in zip(self._weights, self._key_values, kv_cache.layers, strict=True):
            self._math.write_context(layer, key_value, normed, rotation, batch.slot_mapping, layer_kv)

    def forward(self, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        """Blocks' rows after the final norm, [T, hidden_size]; their KV is of no use afterwards."""
        embedded = F.embedding(batch.token_ids, self.vocabulary.embedding).float()
        if self._mask_embedding is not None:
            embedded = torch.where((batch.token_ids == self.mask_token_id).unsqueeze(1), self._mask_embedding, embedded)
        return self._norm(self._layers.run(embedded, self._math.rotation(batch.positions), batch, kv_cache))

    def write_context_on(self, features: torch.Tensor, on: DevicePass) -> None:
        """As `write_context`, on the kernels of a device. features: [T, width] in the head's dtype, unchanged."""
        normed = on.norm(None, features, self._context_weight)
        for index, (layer, key_value) in enumerate(zip(self._weights, self._key_values, strict=True)):
            on.write_context(layer, key_value, normed, index)

    def run(self, on: DevicePass) -> torch.Tensor:
        """As `forward`, on the kernels of a device, in the head's dtype."""
        residual = F.embedding(on.inputs.token_ids, self.vocabulary.embedding)
        if self._mask_embedding is not None:
            is_mask = (on.inputs.token_ids == self.mask_token_id).unsqueeze(1)
            residual = torch.where(is_mask, self._mask_embedding.to(residual.dtype), residual)
        return on.norm(on.layers(self._weights, None, residual, first=0), residual, self._norm_weight)


def _block_size(config: HeadConfig) -> int:
    """Tokens of a block, anchor included.

    Raises:
        InvalidArgumentError: less than two.
    """
    size = config.number("block_size", _DEFAULT_BLOCK)
    if size < 2:
        raise InvalidArgumentError(f"{config.name}: block_size is {size}, but a block has at least 2 tokens; save the head again")
    return size


def _mask_token_id(config: HeadConfig) -> int:
    """The id that stands for an unknown token, by the names that formats have for it.

    Raises:
        InvalidArgumentError: there is none, or it is outside of the vocabulary.
    """
    name = next((name for name in ("mask_token_id", "dspark_noise_token_id") if config.options.get(name) is not None), "mask_token_id")
    token_id, size = config.number(name), config.layers.vocab_size
    if token_id >= size:
        raise InvalidArgumentError(f"{config.name}: {name} is {token_id}, but the vocabulary ends at {size - 1}; save the head again")
    return token_id


def _refuse_windows(config: HeadConfig) -> None:
    kinds = sorted(set(config.layer_types) - {"full_attention"})
    if kinds or config.flag("use_swa"):
        raise UnsupportedError(
            f"{config.name} has layers of {', '.join(kinds) or 'sliding_attention'}, which are not built for draft heads; "
            "use a head whose layers attend to all of the context"
        )


def _read_mask_embedding(reader: HeadReader, config: HeadConfig, mask_token_id: int) -> torch.Tensor | None:
    """A file beside the tensors may hold an embedding of its own for the mask token: a tensor, or a mapping with its id."""
    path = reader.tensors.folder / _MASK_FILE
    if not path.is_file():
        return None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise InvalidArgumentError(f"{path} can't be read ({error}); fetch or save the head again") from error
    if isinstance(stored, dict):
        if stored.get("mask_token_id") != mask_token_id:
            raise InvalidArgumentError(
                f"{path} is for the mask token {stored.get('mask_token_id')}, but config.json has {mask_token_id}; save the head again"
            )
        stored = stored.get("embedding")
    hidden = config.layers.hidden_size
    if not isinstance(stored, torch.Tensor) or stored.numel() != hidden:
        raise InvalidArgumentError(f"{path} holds no embedding of {hidden} numbers; save the head again")
    return stored.reshape(hidden).to(reader.device, torch.float32)
