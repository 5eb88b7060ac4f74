"""Heads' sources of features, made up."""

from collections.abc import Sequence

import torch

from specwire.engine.heads.source import FINAL_LAYER, FeatureSource


def make_source(
    layer_ids: Sequence[int],
    hidden_size: int,
    *,
    width: int = 0,
    dtype: torch.dtype = torch.float32,
    norms: str = "",
    name: str = "made-up",
    seed: int = 0,
) -> FeatureSource:
    """width: of a random projection; 0 = none. norms: "", "each" layer id, or "all" of them side by side."""
    generator = torch.Generator().manual_seed(seed)
    wide = len(layer_ids) * hidden_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights = {"": None, "each": tuple(1 + random(hidden_size) for _ in layer_ids), "all": (1 + random(wide),)}[norms]
    projection = random(width, wide).to(dtype) if width else None
    return FeatureSource(name, tuple(layer_ids), projection, width or wide, dtype, f"{name}-{seed}", weights, 1e-5)


def eagle3_source(num_layers: int, hidden_size: int, width: int = 24, **changes: object) -> FeatureSource:
    """Three layers, projected; the first one is the embedding, the last one leaves the last layer."""
    return make_source((0, num_layers // 2, num_layers), hidden_size, width=width, name="eagle3", **changes)  # type: ignore[arg-type]


def eagle_source(hidden_size: int, **changes: object) -> FeatureSource:
    """The last hidden state."""
    return make_source((FINAL_LAYER,), hidden_size, name="eagle", **changes)  # type: ignore[arg-type]
