"""EAGLE (https://arxiv.org/abs/2401.15077): layers over one product of embedding and the target's last hidden state."""

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


class EagleHead:
    """See `specwire.engine.heads.head.SequentialHead`; arguments as `Eagle3Head`. The first layer has no norm in front, the last one none behind."""

    def __init__(self, reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> None:
        shape, hidden = config.layers, config.layers.hidden_size
        self.vocabulary = read_vocabulary(reader, config, target)
        self._dtype = reader.dtype
        self._math = LayerMath(shape, reader.dtype, reader.device, num_positions)
        self._fc = reader.linear(["fc"], (hidden,), 2 * hidden, has_bias="fc.bias" in reader.tensors)
        self._first = reader.layer("layers.0", has_input_norm=False)
        self._post_norm = RmsNorm(self._first.post_norm, shape.rms_norm_eps, reader.dtype)
        self._more = [reader.layer(f"layers.{i}") for i in range(1, shape.num_layers)]
        self._others = Layers(self._math, self._more, shape, reader.dtype, first=1)
        self.tables = DeviceTables(self._math, shape, reader.dtype)

    def forward(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        rotation = self._math.rotation(batch.positions)
        embedded = F.embedding(batch.token_ids, self.vocabulary.embedding)
        fused = self._fc(torch.cat((embedded, features.to(self._dtype)), -1))
        residual = fused.float() + self._math.attend(self._first, fused, rotation, batch, kv_cache.layers[0])
        residual += self._math.feed_forward(self._first, self._post_norm(residual))
        return self._others.run(residual, rotation, batch, kv_cache)

    def run(self, features: torch.Tensor, on: DevicePass) -> HeadStates:
        fused = on.backend.linear(self._fc, torch.cat((F.embedding(on.inputs.token_ids, self.vocabulary.embedding), features), -1))
        residual = fused.clone()
        x = on.attend(self._first, fused, 0)
        x = on.feed_forward(self._first, on.norm(x, residual, self._first.post_norm))
        residual += on.layers(self._more, x, residual, first=1)
        return HeadStates(residual, residual)

    def output(self, residual: torch.Tensor) -> torch.Tensor:
        return residual.to(self._dtype)

    def carry(self, residual: torch.Tensor) -> torch.Tensor:
        return residual
