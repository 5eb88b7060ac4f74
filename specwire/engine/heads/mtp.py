"""MTP as MiMo has it (https://arxiv.org/abs/2505.07608): one more layer over the norms of embedding and last hidden state."""

from pathlib import Path

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.device import DevicePass, DeviceTables, HeadStates
from specwire.engine.heads.head import Layers
from specwire.engine.heads.tensors import HeadReader
from specwire.engine.heads.vocabulary import read_vocabulary
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.layer import LayerMath, RmsNorm
from specwire.errors import UnsupportedError

_PREFIX = "mtp_layers.0"


class MtpHead:
    """See `specwire.engine.heads.head.SequentialHead`; arguments as `Eagle3Head`. The one layer is run again for every draft."""

    def __init__(self, reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> None:
        count = config.number("num_nextn_predict_layers", 1)
        if count != 1:
            raise UnsupportedError(f"{config.name}: num_nextn_predict_layers is {count}, but only 1 is built; use a checkpoint with one MTP layer")
        shape, hidden, eps = config.layers, config.layers.hidden_size, config.layers.rms_norm_eps
        self.vocabulary = read_vocabulary(reader, config, target)
        self._dtype = reader.dtype
        self._math = LayerMath(shape, reader.dtype, reader.device, num_positions)
        self._token_weight, self._hidden_weight, self._norm_weight = (
            reader.single(f"{_PREFIX}.{name}_layernorm.weight", hidden) for name in ("token", "hidden", "final")
        )
        self._token_norm, self._hidden_norm, self._norm = (
            RmsNorm(weight, eps, reader.dtype) for weight in (self._token_weight, self._hidden_weight, self._norm_weight)
        )
        self._proj = reader.linear([f"{_PREFIX}.input_proj"], (hidden,), 2 * hidden)
        self._layer = reader.layer(_PREFIX)
        self._layers = Layers(self._math, [self._layer], shape, reader.dtype)
        self.tables = DeviceTables(self._math, shape, reader.dtype)
        # MiMo's own files and the speculators library put the two halves in opposite orders.
        self._embedding_first = config.is_speculators

    def forward(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        embedded = self._token_norm(F.embedding(batch.token_ids, self.vocabulary.embedding).float())
        hidden = self._hidden_norm(features.float())
        halves = (embedded, hidden) if self._embedding_first else (hidden, embedded)
        residual = self._proj(torch.cat(halves, -1)).float()
        return self._layers.run(residual, self._math.rotation(batch.positions), batch, kv_cache)

    def run(self, features: torch.Tensor, on: DevicePass) -> HeadStates:
        embedded = on.norm(None, F.embedding(on.inputs.token_ids, self.vocabulary.embedding), self._token_weight)
        hidden = on.norm(None, features, self._hidden_weight)
        residual = on.backend.linear(self._proj, torch.cat((embedded, hidden) if self._embedding_first else (hidden, embedded), -1))
        output = on.norm(on.layers([self._layer], None, residual, first=0), residual, self._norm_weight)
        return HeadStates(output, output)

    def output(self, residual: torch.Tensor) -> torch.Tensor:
        return self._norm(residual)

    def carry(self, residual: torch.Tensor) -> torch.Tensor:
        return self._norm(residual).float()
