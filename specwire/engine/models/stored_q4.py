"""4-bit weights in a model's folder, as the file that it was converted from has them: in a subfolder, which readers of the format don't see."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specwire.engine.kernels.packed_linear import Q4Weight
from specwire.errors import InvalidArgumentError

_FILE = Path("q4", "model.safetensors")
_LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def save_q4(folder: Path, weights: Mapping[str, Q4Weight]) -> None:
    """Writes weights by name, two codes to a byte (the lower half is the first)."""
    tensors = {}
    for name, weight in weights.items():
        tensors[f"{name}.codes"] = weight.codes[:, ::2] | weight.codes[:, 1::2] << 4
        tensors[f"{name}.scale"], tensors[f"{name}.minimum"] = weight.scale, weight.minimum
    (folder / _FILE).parent.mkdir(exist_ok=True)
    save_file(tensors, folder / _FILE)


class StoredQ4:
    """What `save_q4` wrote into a folder; without the file it has nothing."""

    def __init__(self, folder: Path) -> None:
        path = folder / _FILE
        try:
            self._file = safe_open(path, framework="pt") if path.is_file() else None
        except (SafetensorError, OSError) as error:
            raise InvalidArgumentError(f"{path} can't be read ({error}); remove {folder}, or save it again") from error
        self._names = set(self._file.keys()) if self._file is not None else set()

    def has_layers(self, num_layers: int) -> bool:
        """Whether all linear layers of all layers are there."""
        return all(self._has(f"model.layers.{index}.{name}.weight") for index in range(num_layers) for name in _LINEARS)

    def read(self, names: Sequence[str]) -> Q4Weight | None:
        """The rows of all these weights, in order; None unless all are there."""
        if self._file is None or not all(map(self._has, names)):
            return None
        return Q4Weight.stacked([self._read(name) for name in names])

    def _has(self, name: str) -> bool:
        return f"{name}.codes" in self._names

    def _read(self, name: str) -> Q4Weight:
        assert self._file is not None, "only weights that are there are read"
        packed, scale, minimum = (self._file.get_tensor(f"{name}.{part}") for part in ("codes", "scale", "minimum"))
        return Q4Weight(torch.stack((packed & 0x0F, packed >> 4), -1).flatten(1), scale, minimum)
