"""EAGLE-3 (https://arxiv.org/abs/2503.01840): a layer over embedding and fused hidden states of several layers, side by side."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.device import DevicePass, DeviceTables, HeadStates
from specwire.engine.heads.head import Layers
from specwire.engine.heads.tensors import HeadReader, HeadTensors
from specwire.engine.heads.vocabulary import read_vocabulary
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.layer import LayerMath, LayerWeights, RmsNorm
from specwire.errors import InvalidArgumentError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """What a forward pass of another kind than `Eagle3Head.forward` needs beside the vocabulary."""

    layers: list[LayerWeights]  # the first one's queries, keys and values read 2 * hidden_size
    hidden_norm: torch.Tensor  # [hidden_size], of features
    final_norm: torch.Tensor  # [hidden_size]
    cos: torch.Tensor  # [num_positions, head_dim]
    signed_sin: torch.Tensor  # [num_positions, head_dim]
    norm_before_residual: bool
    """The residual stream begins with the feature's norm."""
    norm_output: bool
    """The next feature is what the final norm gives."""


class Eagle3Head:
    """See `specwire.engine.heads.head.SequentialHead`. The features are fc of the hidden states, which the verifier computes.

    Args:
        reader: the checkpoint.
        config: its description.
        target: folder of the target, whose embedding and output layer it may share.
        num_positions: tokens that a sequence may reach.
    """

    def __init__(self, reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> None:
        shape, eps = config.layers, config.layers.rms_norm_eps
        hidden = shape.hidden_size
        self.vocabulary = read_vocabulary(reader, config, target)
        self._math = LayerMath(shape, reader.dtype, reader.device, num_positions)
        self._first = reader.layer("layers.0", in_features=2 * hidden)
        self._input_norm = RmsNorm(self._first.input_norm, eps, reader.dtype)
        self._hidden_weight = reader.single("layers.0.hidden_norm.weight", hidden)
        self._hidden_norm = RmsNorm(self._hidden_weight, eps, reader.dtype)
        self._post_norm = RmsNorm(self._first.post_norm, eps, reader.dtype)
        self._more = [reader.layer(f"layers.{i}") for i in range(1, shape.num_layers)]
        self._others = Layers(self._math, self._more, shape, reader.dtype, first=1)
        self._norm_weight = reader.single("norm.weight", hidden)
        self._norm = RmsNorm(self._norm_weight, eps, reader.dtype)
        self.tables = DeviceTables(self._math, shape, reader.dtype)
        # Folders of the library always say it; in plain ones its absence means what the paper's code does.
        self._norm_before_residual = config.flag("norm_before_residual", config.is_speculators)
        self._norm_output = config.flag("norm_output")

    @property
    def weights(self) -> Eagle3Weights:
        """The tensors themselves, not copies."""
        return Eagle3Weights(
            [self._first, *self._more], self._hidden_weight, self._norm_weight, self._math.cos[:, 0], self._math.sin[:, 0],
            self._norm_before_residual, self._norm_output,
        )  # fmt: skip

    def forward(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        rotation = self._math.rotation(batch.positions)
        hidden = features.float()
        normed = self._hidden_norm(hidden)
        embedded = self._input_norm(F.embedding(batch.token_ids, self.vocabulary.embedding).float())
        attended = self._math.attend(self._first, torch.cat((embedded, normed), -1), rotation, batch, kv_cache.layers[0])
        residual = (normed.float() if self._norm_before_residual else hidden) + attended
        residual += self._math.feed_forward(self._first, self._post_norm(residual))
        return self._others.run(residual, rotation, batch, kv_cache)

    def run(self, features: torch.Tensor, on: DevicePass) -> HeadStates:
        first = self._first
        embedded = on.norm(None, F.embedding(on.inputs.token_ids, self.vocabulary.embedding), first.input_norm)
        normed = on.norm(None, features, self._hidden_weight)
        residual = (normed if self._norm_before_residual else features).clone()
        x = on.attend(first, torch.cat((embedded, normed), -1), 0)
        x = on.feed_forward(first, on.norm(x, residual, first.post_norm))
        output = on.norm(on.layers(self._more, x, residual, first=1), residual, self._norm_weight)
        return HeadStates(output, output if self._norm_output else residual)

    def output(self, residual: torch.Tensor) -> torch.Tensor:
        return self._norm(residual)

    def carry(self, residual: torch.Tensor) -> torch.Tensor:
        return self._norm(residual).float() if self._norm_output else residual


def fusion(config: HeadConfig, tensors: HeadTensors, num_states: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """The projection [hidden_size, num_states * target_hidden_size], and the norms in front of it.

    Raises:
        InvalidArgumentError, UnsupportedError: the checkpoint is no such head.
    """
    width = config.target_hidden_size
    if not config.flag("use_aux_hidden_state", default=True):
        raise UnsupportedError(f"{config.name}: use_aux_hidden_state false is not built; use a head over hidden states of several layers")
    if "fc.bias" in tensors:
        raise UnsupportedError(f"{config.name} has a tensor fc.bias, which is not built; use a head without it")
    before, each = config.flag("norm_before_fc"), config.flag("fc_norm")
    if before and each:
        raise InvalidArgumentError(f"{config.name}: norm_before_fc and fc_norm are both true, but exclude each other; save the head again")
    norms: tuple[torch.Tensor, ...] | None = None
    if before:
        norms = (tensors.read("input_norm.weight", (num_states * width,)).clone(),)
    elif each:
        norms = tuple(tensors.read(f"fc_norm.{i}.weight", (width,)).clone() for i in range(num_states))
    return tensors.read("fc.weight", (config.layers.hidden_size, num_states * width)).clone(), norms
