"""The tensors of a head's folder by one naming, whatever format they were saved in."""

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specwire.engine.cache_dir import file_sha256
from specwire.engine.kernels.linear import Linear
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.hashing import weights_hash
from specwire.engine.models.layer import LayerWeights
from specwire.engine.models.weights import make_linear
from specwire.errors import InvalidArgumentError
from specwire.json_files import read_shards

TILES = "tiles"
"""Format of linear layers that only `specwire.engine.cpu` has."""
_PICKLED = "pytorch_model.bin"


class HeadTensors:
    """Tensors by names without `model.`; `midlayer` is layer 0.

    Args:
        folder: with model.safetensors, shards and their index, or pytorch_model.bin.

    Raises:
        InvalidArgumentError: there are none, or they can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[Path, str]] = {}  # name -> file, name in it
        self._loaded: dict[str, torch.Tensor] = {}
        try:
            for path in self._paths():
                if path.name == _PICKLED:
                    pickled = torch.load(path, map_location="cpu", weights_only=True)
                    self._loaded |= {_plain(name): tensor for name, tensor in pickled.items()}
                else:
                    with safe_open(path, framework="pt") as handle:
                        self._files |= {_plain(name): (path, name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise InvalidArgumentError(f"{folder}: its weights can't be read ({error}); fetch or save the head again") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._loaded

    @property
    def names(self) -> Iterator[str]:
        yield from self._files
        yield from self._loaded

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers: that of the first tensor that holds any."""
        for name, (path, stored) in self._files.items():
            if name not in ("d2t", "t2d"):
                with safe_open(path, framework="pt") as handle:
                    return handle.get_slice(stored)[:0].dtype
        return next(tensor.dtype for name, tensor in self._loaded.items() if tensor.is_floating_point())

    @property
    def hash(self) -> str:
        """Identity of configuration and weights (hex sha256)."""
        digest = hashlib.sha256(weights_hash(self.folder).encode())
        pickled = self.folder / _PICKLED
        if self._loaded:
            digest.update(file_sha256(pickled).encode())
        return digest.hexdigest()

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor as it was saved: the file itself, in memory. What is kept on a CPU has to be copied, as `HeadReader.keep` does: who writes the
        file anew would change the head that runs, or crash it.

        Raises:
            InvalidArgumentError: there is none of the name, or it has another shape.
        """
        if name in self._files:
            path, stored = self._files[name]
            with safe_open(path, framework="pt") as handle:
                tensor = handle.get_tensor(stored)
        elif name in self._loaded:
            tensor = self._loaded[name]
        else:
            raise InvalidArgumentError(f"{self.folder} has no tensor {name}, which a head of its kind needs")
        if tuple(tensor.shape) != tuple(shape):
            raise InvalidArgumentError(f"{self.folder}: tensor {name} has shape {tuple(tensor.shape)}, but its config.json asks for {tuple(shape)}")
        return tensor

    def _paths(self) -> list[Path]:
        index, single, pickled = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors", self.folder / _PICKLED
        alone = [path for path in (single, pickled) if path.is_file()][:1]
        paths = [self.folder / file for file in read_shards(index)] if index.is_file() else alone
        missing = [path.name for path in paths if not path.is_file()]
        if missing or not paths:
            lacks = ", ".join(missing) or f"model.safetensors or {_PICKLED}"
            raise InvalidArgumentError(f"{self.folder} has no {lacks}; fetch or save the head again")
        return paths


class HeadReader:
    """Tensors of a head, in the numbers and at the place that it is computed in.

    Args:
        tensors: where they come from.
        config: shape of its layers.
        dtype, device: of everything that has no format of its own.
        weights: format of linear layers, see `specwire.engine.models.weights`; empty = dense, `TILES` = 8 bits in tiles.
        output_weights: that of the output layer.
        is_narrowed: only frequent ids are drafted, if the folder says which are.
    """

    def __init__(
        self,
        tensors: HeadTensors,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weights: str = "",
        output_weights: str = "",
        is_narrowed: bool = False,
    ) -> None:
        self.tensors = tensors
        self.config = config
        self.weights = weights
        self.output_weights = output_weights
        self.is_narrowed = is_narrowed
        self.dtype = dtype
        self.device = device

    def single(self, name: str, *shape: int) -> torch.Tensor:
        return self.keep(self.tensors.read(name, shape))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `HeadTensors.read` gives, in the head's own memory."""
        return tensor.to(self.device, self.dtype, copy=self.device.type == "cpu")

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int, *, has_bias: bool = False) -> Linear:
        """Products that are computed as one, in the order of their names (without .weight)."""
        shapes = list(zip(names, out_features, strict=True))
        bias = self._joined([self.tensors.read(f"{name}.bias", (rows,)) for name, rows in shapes]) if has_bias else None
        weight = self._joined([self.tensors.read(f"{name}.weight", (rows, in_features)) for name, rows in shapes])
        if self.weights == TILES:
            from specwire.engine.cpu.byte_linear import ByteLinear  # brings a compiler

            return ByteLinear(weight, bias)
        return make_linear(self.weights, lambda: None, lambda: weight, bias)

    def layer(self, prefix: str, *, in_features: int = 0, has_input_norm: bool = True) -> LayerWeights:
        """A decoder layer in transformers' naming.

        Args:
            prefix: of its names, such as "layers.0".
            in_features: of queries, keys and values; 0 = hidden_size.
            has_input_norm: else the layer's input is used as it is.
        """
        config = self.config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention = f"{prefix}.self_attn"
        return LayerWeights(
            input_norm=self.single(f"{prefix}.input_layernorm.weight", hidden)
            if has_input_norm
            else torch.ones(hidden, dtype=self.dtype, device=self.device),
            qkv=self.linear([f"{attention}.{part}_proj" for part in "qkv"], (heads, kv, kv), in_features or hidden, has_bias=config.qkv_bias),
            q_norm=self.single(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self.single(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
            o=self.linear([f"{attention}.o_proj"], (hidden,), heads, has_bias=config.o_bias),
            post_norm=self.single(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self.linear([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], (inner, inner), hidden, has_bias=config.mlp_bias),
            down=self.linear([f"{prefix}.mlp.down_proj"], (hidden,), inner, has_bias=config.mlp_bias),
        )

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.to(self.device, self.dtype) for part in parts])  # a copy, even of a single one


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
