"""Cuts of the products of a few rows, measured alone beside cuBLAS."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import graph_us, num_sets, relative_error
from specwire.engine.kernels.layer_ops import add_rms_norm
from specwire.engine.kernels.options import Product, ProductTuning, padded_rows
from specwire.engine.kernels.skinny_linear import ProductScratch, skinny_linear
from specwire.engine.models.config import ModelConfig

_CUTS = ((64, 128, 4, 4), (64, 64, 6, 4), (64, 256, 3, 4), (128, 64, 5, 4), (128, 64, 5, 8), (128, 128, 3, 8), (32, 128, 5, 4))
"""Features, depth, stages, warps."""
_MAX_TILE_BYTES = 220 * 1024
"""Of a multiprocessor's shared memory, for all stages."""
_NUM_PROGRAMS = (264, 528)
"""Two and four for each multiprocessor; features are split among so many."""
_MAX_SPLITS = 8
_TOLERANCE = 6e-3
_REP_MS = 20


def sweep_products(config: ModelConfig, numbers_of_rows: Sequence[int], bandwidth: float) -> Iterator[dict[str, Any]]:
    """A row for each product and cut, behind the kernel that stands before it in a layer; the fastest that beats cuBLAS has `product`.

    Args:
        config: whose layers' products.
        numbers_of_rows: 2 to 128 each.
        bandwidth: bytes a second of a copy, for the floor.
    """
    hidden, width = config.hidden_size, config.intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {"qkv": (heads, hidden), "o": (hidden, config.num_heads * config.head_dim), "gate_up": (2 * width, hidden), "down": (hidden, width)}
    for num_rows, (name, shape) in itertools.product(numbers_of_rows, shapes.items()):
        rows = list(_sweep(num_rows, *shape, bandwidth))
        fastest = min(rows, key=lambda row: float(row["us"]))
        if fastest["us"] < fastest["cublas_us"]:
            fastest["product"] = dataclasses.asdict(Product(padded_rows(num_rows), *shape, ProductTuning(**fastest["tuning"])))
        yield from ({"case": f"{name}, {num_rows} rows", **row, "is_best": "product" in row} for row in rows)


def _sweep(num_rows: int, out_features: int, in_features: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    sets = num_sets(2 * out_features * in_features)
    weights = [_normal(out_features, in_features) / in_features**0.5 for _ in range(sets)]
    residual, norm = _normal(num_rows, in_features), _normal(in_features)
    before = partial(add_rms_norm, None, residual, norm, 1e-5)

    def cublas(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(before(), weight)

    expected = F.linear(before().float(), weights[0].float())
    cublas_us = graph_us([partial(cublas, weight) for weight in weights], _REP_MS)
    before_us = graph_us([before] * 32, _REP_MS)
    for tuning in product_tunings(out_features, padded_rows(num_rows)):
        scratch = ProductScratch([Product(padded_rows(num_rows), out_features, in_features, tuning)], weights[0].device)

        def ours(weight: torch.Tensor, tuning: ProductTuning = tuning, scratch: ProductScratch = scratch) -> torch.Tensor:
            return skinny_linear(before(early=True), weight, None, tuning, scratch, early=True)

        error = relative_error(ours(weights[0]), expected)
        assert error < _TOLERANCE, (num_rows, out_features, in_features, tuning, error)
        us = graph_us([partial(ours, weight) for weight in weights], _REP_MS)
        floor_us = 2 * out_features * in_features / bandwidth * 1e6
        timed = {"us": us, "cublas_us": cublas_us, "x_cublas": us / cublas_us, "norm_us": before_us, "floor_us": floor_us, "error": error}
        shown = f"{tuning.features} x {tuning.depth}, {tuning.splits} splits, {tuning.num_stages} stages"
        yield {"cut": shown, **timed, "tuning": dataclasses.asdict(tuning)}


def product_tunings(out_features: int, rows: int) -> list[ProductTuning]:
    """Cuts worth a try for a weight and a padded number of rows."""
    found: dict[ProductTuning, None] = {}  # each once, in this order
    for (features, depth, stages, warps), num_programs in itertools.product(_CUTS, _NUM_PROGRAMS):
        if 2 * (features + rows) * depth * stages > _MAX_TILE_BYTES:
            continue
        splits = min(max(round(num_programs * features / out_features), 1), _MAX_SPLITS)
        found[ProductTuning(features, depth, splits, stages, warps)] = None
    return list(found)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
