"""Made-up weights: the recipe in plain integers, its statistics, and what the numbers depend on."""

import hashlib

import numpy as np
import pytest
import torch

from specwire.engine.models import dummy
from specwire.engine.models.dummy import DummySource, dummy_digest

SHAPES = {"a.weight": (300, 7), "b.weight": (300, 7), "c.bias": (5,), "input_norm.weight": (3,)}


def source(dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 0.02) -> DummySource:
    return DummySource(SHAPES, dtype, "cpu", seed, std)


def expected(name: str, count: int, seed: int, std: float) -> np.ndarray:
    """The recipe in numpy's unsigned integers."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "little")
    with np.errstate(over="ignore"):
        hashes = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    return hashes.view(np.int32).astype(np.float32) * np.float32(std * 3**0.5 / 2**31)


@pytest.mark.parametrize("chunk", [1 << 18, 64, 1])
def test_values_are_those_of_the_recipe_in_any_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setitem(dummy._CHUNK, "cpu", chunk)
    tensors = source(seed=3, std=0.5)
    for name in ("a.weight", "c.bias", "b.weight"):
        values = tensors.read(name)
        assert values.shape == SHAPES[name]
        assert np.array_equal(values.view(-1).numpy(), expected(name, values.numel(), 3, 0.5))


def test_statistics() -> None:
    values = DummySource({"w.weight": (512, 512)}, torch.float32, "cpu", 0, 0.02).read("w.weight")
    assert values.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(values.mean().item()) < 2e-4
    assert values.unique().numel() > 0.99 * values.numel()
    for lag in (1, 2, 64, 512, 4096):  # neighbours in rows and columns
        flat = values.view(-1)
        assert abs((flat[:-lag] * flat[lag:]).mean().item()) / 0.02**2 < 0.01, lag
    # A product with it behaves as with independent numbers: no direction stands out.
    assert torch.linalg.svdvals(values)[0].item() == pytest.approx(2 * 512**0.5 * 0.02, rel=0.05)


def test_name_and_seed_change_the_values_and_the_dtype_only_rounds_them() -> None:
    values = source().read("a.weight")
    assert torch.equal(values, source().read("a.weight"))
    assert torch.equal(values.bfloat16(), source(torch.bfloat16).read("a.weight"))
    assert not torch.equal(values, source().read("b.weight"))
    assert not torch.equal(values, source(seed=1).read("a.weight"))
    assert torch.equal(source().read("input_norm.weight"), torch.ones(3))


def test_the_digest_names_configuration_seed_and_scale() -> None:
    digests = [dummy_digest(*arguments) for arguments in (("x", 0, 0.02), ("y", 0, 0.02), ("x", 1, 0.02), ("x", 0, 0.03))]
    assert len(set(digests)) == 4
    assert dummy_digest("x", 0, 0.02) == digests[0]


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits() -> None:
    shapes = {"w.weight": (5000, 4099)}  # more than one chunk
    on_cpu, on_gpu = (DummySource(shapes, torch.float32, device, 7, 0.02).read("w.weight") for device in ("cpu", "cuda"))
    assert torch.equal(on_gpu.cpu(), on_cpu)
