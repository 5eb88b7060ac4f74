"""Cuts of streamed products of one and two rows, measured alone beside what the engine takes now, with what stands before and behind them in a layer.

`streamed` replaces the product alone; `fused` has the norm before it, the gates behind it or the residual sum inside.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernel_variants import row_products_of
from benchmarks.gpu.timing import graph_us, num_sets, relative_error
from specwire.engine.kernels.layer_ops import add_rms_norm, silu_mul
from specwire.engine.kernels.options import KernelOptions, RowProduct, RowTuning, padded_rows
from specwire.engine.kernels.row_linear import row_linear
from specwire.engine.kernels.row_stream import row_stream
from specwire.engine.kernels.skinny_linear import ProductScratch, skinny_linear
from specwire.engine.models.config import ModelConfig

_CUTS = ((8192, 4), (4096, 4), (8192, 8), (16384, 8))
"""Numbers that are loaded at a time, warps. Each is a compilation; numbers of programs are none."""
_NUMS_PROGRAMS = (264, 396, 528, 1056)
"""Two, three, four and eight for each multiprocessor."""
_MAX_NUMBERS_PER_THREAD = 64
"""Of a row; with more the compiler spills."""
_TOLERANCE = 6e-3
_REP_MS = 20
_EPS = 1e-5
KINDS = ("streamed", "fused")


@dataclass(frozen=True, slots=True)
class _Weight:
    """A product of a layer, or the head's.

    Args:
        name: qkv, o, gate_up, down or head.
        out_features: of the weight; a gate_up has both halves.
    """

    name: str
    out_features: int
    in_features: int

    @property
    def has_norm(self) -> bool:
        """A norm stands before it."""
        return self.name in ("qkv", "gate_up")

    @property
    def is_gated(self) -> bool:
        return self.name == "gate_up"


def weights_of(config: ModelConfig) -> list[_Weight]:
    """Of a layer, and the head."""
    hidden, width = config.hidden_size, config.intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {"qkv": (heads, hidden), "o": (hidden, config.num_heads * config.head_dim), "gate_up": (2 * width, hidden), "down": (hidden, width)}
    return [_Weight(name, *shape) for name, shape in {**shapes, "head": (config.vocab_size, hidden)}.items()]


def sweep_rows(config: ModelConfig, bandwidth: float, options: KernelOptions) -> Iterator[dict[str, Any]]:
    """A row for each weight, kind and cut at one row, and for the best cut at two; the best of a kind that beats what the engine takes has `product`.

    Args:
        bandwidth: bytes a second of a copy, for the floor.
        options: what the engine takes now.
    """
    for weight in weights_of(config):
        for kind in KINDS if weight.name != "head" else KINDS[:1]:
            chain = _Chain(weight, 1, options)
            rows = [chain.time(kind, tuning, bandwidth) for tuning in tunings(weight)]
            best = min(rows, key=lambda row: float(row["us"]))
            tuning = RowTuning(**best["tuning"])
            if best["us"] < best["now_us"]:
                best["product"] = dataclasses.asdict(RowProduct(weight.out_features, weight.in_features, tuning))
            yield from rows
            del chain
            yield _Chain(weight, 2, options).time(kind, tuning, bandwidth)


def tunings(weight: _Weight) -> list[RowTuning]:
    """Cuts worth a try."""
    columns = 1 << (weight.in_features - 1).bit_length()
    found = []
    for numbers, num_warps in _CUTS:
        if columns // (32 * num_warps) <= _MAX_NUMBERS_PER_THREAD and (numbers >= columns or (numbers, num_warps) == _CUTS[0]):
            found += [RowTuning(numbers, num_warps, num_programs) for num_programs in _NUMS_PROGRAMS]
    return found


def best_products(rows: Sequence[dict[str, Any]], kind: str) -> tuple[RowProduct, ...]:
    """Those that beat what the engine takes now, from the rows of a sweep."""
    return row_products_of([row["product"] for row in rows if row["kind"] == kind and "product" in row])


class _Chain:
    """A product behind the kernel before it, on many weights.

    Args:
        num_rows: one or two.
        options: what the engine takes now.
    """

    def __init__(self, weight: _Weight, num_rows: int, options: KernelOptions) -> None:
        self._weight, self._num_rows = weight, num_rows
        shape = (weight.out_features, weight.in_features)
        self._weights = [_normal(*shape) / weight.in_features**0.5 for _ in range(num_sets(2 * weight.out_features * weight.in_features))]
        self._residual, self._norm = _normal(num_rows, weight.in_features), _normal(weight.in_features)
        self._sum = _normal(num_rows, weight.out_features) if weight.name in ("o", "down") else None
        key = (padded_rows(num_rows), *shape)
        tuned = {(product.rows, product.out_features, product.in_features): product for product in options.products}.get(key)
        self._tuned = tuned.tuning if tuned is not None and num_rows > 1 else None
        self._scratch = ProductScratch([tuned] if tuned is not None else [], self._residual.device)
        self._early = options.starts_early
        before = add_rms_norm(None, self._residual, self._norm, _EPS).float()
        product = before @ self._weights[0].float().t()
        self._expected = _gated(product) if weight.is_gated else product
        self._now_us = graph_us([partial(self._now, each) for each in self._weights], _REP_MS)

    def time(self, kind: str, tuning: RowTuning, bandwidth: float) -> dict[str, Any]:
        """Of one cut."""
        weight = self._weight
        run = self._streamed if kind == "streamed" else self._fused
        output = run(self._weights[0], tuning, is_checked=True)
        error = relative_error(output, self._expected)
        assert error < _TOLERANCE, (weight, kind, tuning, error)
        us = graph_us([partial(run, each, tuning) for each in self._weights], _REP_MS)
        return {
            "case": f"{weight.name}, {self._num_rows} rows",
            "kind": kind,
            "cut": f"{tuning.numbers} numbers, {tuning.num_warps} warps, {tuning.num_programs} programs",
            "us": us,
            "now_us": self._now_us,
            "x_now": us / self._now_us,
            "floor_us": 2 * weight.out_features * weight.in_features / bandwidth * 1e6,
            "error": error,
            "tuning": dataclasses.asdict(tuning),
        }

    def _before(self) -> torch.Tensor:
        return add_rms_norm(None, self._residual, self._norm, _EPS, early=self._early)

    def _now(self, weight: torch.Tensor) -> torch.Tensor:
        """As the engine has it."""
        before = self._before()
        if self._weight.name == "head":
            return torch.mm(before, weight.t(), out_dtype=torch.float32) if weight.is_cuda else before.float() @ weight.float().t()
        if self._num_rows == 1:
            product = row_linear(before, weight, early=self._early)
        elif self._tuned is not None:
            product = skinny_linear(before, weight, None, self._tuned, self._scratch, early=self._early)
        else:
            product = before @ weight.t()
        return silu_mul(product, early=self._early) if self._weight.is_gated else product

    def _streamed(self, weight: torch.Tensor, tuning: RowTuning, *, is_checked: bool = False) -> torch.Tensor:
        output = None
        if self._weight.name == "head":
            output = torch.empty(self._num_rows, self._weight.out_features, device=weight.device)
        product = row_stream(self._before(), weight, tuning=tuning, output=output, early=self._early)
        return silu_mul(product, early=self._early) if self._weight.is_gated else product

    def _fused(self, weight: torch.Tensor, tuning: RowTuning, *, is_checked: bool = False) -> torch.Tensor:
        if self._weight.has_norm:
            gates = self._weight.is_gated
            return row_stream(self._residual, weight, tuning=tuning, norm=self._norm, eps=_EPS, gates=gates, early=self._early)
        assert self._sum is not None, self._weight
        total = self._sum.zero_() if is_checked else self._sum
        return row_stream(self._before(), weight, tuning=tuning, residual=total, early=self._early)


def _gated(product: torch.Tensor) -> torch.Tensor:
    gates, values = product.chunk(2, -1)
    return torch.nn.functional.silu(gates) * values


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
