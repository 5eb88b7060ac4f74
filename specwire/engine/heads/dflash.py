"""DFlash (https://arxiv.org/abs/2602.06036): a block of mask tokens denoised in one pass, over KV injected from the target's hidden states."""

import pickle
from pathlib import Path

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.device import DevicePass, DeviceTables
from specwire.engine.heads.head import Layers
from specwire.engine.heads.tensors import HeadReader
from specwire.engine.heads.vocabulary import Vocabulary, read_vocabulary
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.layer import LayerMath, RmsNorm
from specwire.errors import InvalidArgumentError, UnsupportedError

_DEFAULT_BLOCK = 8
_MASK_FILE = "mask_embedding.pt"


class BlockLayers:
    """The layers of DFlash and DSpark, which `specwire.engine.heads.head.BlockHead` describes.

    Args:
        reader: the checkpoint.
        config: its description.
        vocabulary: of the head.
        num_positions: tokens that a sequence may reach.
        num_queries: tokens of a block, which may reach past them.
    """

    def __init__(self, reader: HeadReader, config: HeadConfig, vocabulary: Vocabulary, num_positions: int, num_queries: int) -> None:
        _refuse_windows(config)
        shape, eps = config.layers, config.layers.rms_norm_eps
        hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        if "mask_hidden" in reader.tensors:
            raise UnsupportedError(f"{config.name} has a tensor mask_hidden, which {config.method} has no use for; use a head of this method")
        self._math = LayerMath(shape, reader.dtype, reader.device, num_positions + num_queries)
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
        self._embedding = vocabulary.embedding
        self._mask_token_id = mask_token_id(config)
        self._mask_embedding = _read_mask_embedding(reader, config, self._mask_token_id)

    def write_context(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> None:
        rotation = self._math.rotation(batch.positions)
        normed = self._context_norm(features.float())
        for layer, key_value, layer_kv in zip(self._weights, self._key_values, kv_cache.layers, strict=True):
            self._math.write_context(layer, key_value, normed, rotation, batch.slot_mapping, layer_kv)

    def forward(self, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        embedded = F.embedding(batch.token_ids, self._embedding).float()
        if self._mask_embedding is not None:
            embedded = torch.where((batch.token_ids == self._mask_token_id).unsqueeze(1), self._mask_embedding, embedded)
        return self._norm(self._layers.run(embedded, self._math.rotation(batch.positions), batch, kv_cache))

    def write_context_on(self, features: torch.Tensor, on: DevicePass) -> None:
        normed = on.norm(None, features, self._context_weight)
        for index, (layer, key_value) in enumerate(zip(self._weights, self._key_values, strict=True)):
            on.write_context(layer, key_value, normed, index)

    def run(self, on: DevicePass) -> torch.Tensor:
        residual = F.embedding(on.inputs.token_ids, self._embedding)
        if self._mask_embedding is not None:
            is_mask = (on.inputs.token_ids == self._mask_token_id).unsqueeze(1)
            residual = torch.where(is_mask, self._mask_embedding.to(residual.dtype), residual)
        return on.norm(on.layers(self._weights, None, residual, first=0), residual, self._norm_weight)


class DFlashHead:
    """See `specwire.engine.heads.head.BlockHead`; arguments as `Eagle3Head`. Every mask predicts the token at its own place."""

    def __init__(self, reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> None:
        if config.flag("sample_from_anchor"):
            raise UnsupportedError(f"{config.name}: sample_from_anchor true is not built for dflash; use a head with false, or one of dspark")
        self.vocabulary = read_vocabulary(reader, config, target)
        self.mask_token_id = mask_token_id(config)
        self.num_queries = block_size(config)
        self.first_draft = 1
        self._layers = BlockLayers(reader, config, self.vocabulary, num_positions, self.num_queries)
        self.is_causal = is_causal(config)
        self.markov = None
        self.confidence = None

    def write_context(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> None:
        self._layers.write_context(batch, features, kv_cache)

    def forward(self, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        return self._layers.forward(batch, kv_cache)

    @property
    def tables(self) -> DeviceTables:
        return self._layers.tables

    def write_context_on(self, features: torch.Tensor, on: DevicePass) -> None:
        self._layers.write_context_on(features, on)

    def run(self, on: DevicePass) -> torch.Tensor:
        return self._layers.run(on)


def block_size(config: HeadConfig) -> int:
    """Tokens of a block, anchor included.

    Raises:
        InvalidArgumentError: less than two.
    """
    size = config.number("block_size", _DEFAULT_BLOCK)
    if size < 2:
        raise InvalidArgumentError(f"{config.name}: block_size is {size}, but a block has at least 2 tokens; save the head again")
    return size


def mask_token_id(config: HeadConfig) -> int:
    """The id that stands for an unknown token, by the names that formats have for it.

    Raises:
        InvalidArgumentError: there is none, or it is outside of the vocabulary.
    """
    name = next((name for name in ("mask_token_id", "dspark_noise_token_id") if config.options.get(name) is not None), "mask_token_id")
    token_id, size = config.number(name), config.layers.vocab_size
    if token_id >= size:
        raise InvalidArgumentError(f"{config.name}: {name} is {token_id}, but the vocabulary ends at {size - 1}; save the head again")
    return token_id


def is_causal(config: HeadConfig) -> bool:
    """Whether a block's tokens see only those before them in the block."""
    return config.flag("causal")


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
