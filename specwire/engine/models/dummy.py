"""Random weights that are the same on every device: integers hashed from their positions, made where the model lives."""

import hashlib
import math
from collections.abc import Mapping

import torch

_RECIPE = "dummy-2"
"""Part of the hash; changes with every change of the values."""
_STEP = 0x9E3779B1
_FIRST_MIX, _SECOND_MIX = 0x7FEB352D, 0x846CA68B  # of the "lowbias32" integer hash
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements at once: what caches hold, or enough to keep a GPU busy. It changes no value."""


def dummy_digest(config: object, seed: int, std: float) -> str:
    """Identifies the weights of a configuration; of no dtype and no device, since neither changes the numbers but by rounding."""
    return hashlib.sha256(f"{_RECIPE} {config} {seed} {std}".encode()).hexdigest()


class DummySource:
    """Gives each tensor of a model, by its name: norms are ones, everything else is uniform with mean 0.

    A value depends on seed, name and position only. The float32 numbers are the same bits on CPUs and all GPUs, which torch's own generators
    do not promise; other dtypes round them.

    Args:
        shapes: of all tensors, by name.
        dtype, device: of the tensors.
        seed: other seeds, other numbers.
        std: standard deviation.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | str, seed: int, std: float) -> None:
        self._shapes = shapes
        self._dtype, self._device = dtype, torch.device(device)
        self._seed, self._limit = seed, std * math.sqrt(3.0)
        self._chunk = _CHUNK[self._device.type]
        self._positions = torch.empty(0, dtype=torch.int32, device=self._device)

    def read(self, name: str) -> torch.Tensor:
        """A new tensor of the name's shape."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        key = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:4], "little")
        flat = tensor.view(-1)
        for begin in range(0, len(flat), self._chunk):
            part = flat[begin : begin + self._chunk]
            part.copy_(self._uniform(len(part), begin * _STEP + key))
        return tensor

    def _uniform(self, count: int, offset: int) -> torch.Tensor:
        """float32 in [-limit, limit] from hashes of offset + i * _STEP, i < count, all modulo 2^32."""
        if count > len(self._positions):
            self._positions = torch.arange(min(self._chunk, max(count, 1 << 12)), dtype=torch.int32, device=self._device).mul_(_signed(_STEP))
        hashes = self._positions[:count] + _signed(offset)
        for shift, factor in ((16, _FIRST_MIX), (15, _SECOND_MIX)):
            # int32 shifts bring copies of the sign in, which do not count here.
            hashes.bitwise_xor_((hashes >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
        return hashes.float().mul_(self._limit / 2**31)


def _signed(value: int) -> int:
    """The int32 that is equal modulo 2^32."""
    return (value + 2**31) % 2**32 - 2**31
