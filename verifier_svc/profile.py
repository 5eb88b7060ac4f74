"""Measures at start what a verify step costs, for policies that choose how many drafts to verify (design section 4)."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from specwire.messages import VerifyCost

from .profile_shapes import MIN_REPEATS, Pair, ProfileLimits, ProfileShapes, RoundShape, profile_shapes

logger = logging.getLogger(__name__)

_LEAST_MS = 1e-3
"""No step is free, whatever the noise of a small one and the slopes of large ones say."""


class RoundTimer(Protocol):
    """Runs rounds of token ids that mean nothing, in KV blocks that hold nothing, while no sequence is open."""

    def round_ms(self, shape: RoundShape) -> float:
        """Milliseconds from the launch of one round to its results."""
        ...


def measure_verify_cost(timer: RoundTimer, limits: ProfileLimits, *, budget_s: float, clock: Callable[[], float] = time.monotonic) -> VerifyCost:
    """Times the rounds of `profile_shapes`, each up to 5 times, before any sequence is open; takes medians. ms_per_row and ms_per_kv_token are
    least squares over all pairs of rounds that differ in nothing else.

    Args:
        timer: its KV cache is overwritten.
        limits: what rounds there may be.
        budget_s: once it is spent, nothing more is measured, which the log says.
    """
    shapes = profile_shapes(limits)
    timer.round_ms(shapes.runs[0])  # first-call costs; code may be compiled for it, which is not to leave nothing of the budget
    started = clock()
    samples: dict[RoundShape, list[float]] = {}
    for shape in shapes.runs:
        if not samples or clock() - started < budget_s:
            samples.setdefault(shape, []).append(timer.round_ms(shape))
    median = {shape: statistics.median(times) for shape, times in samples.items()}
    repeated = {shape: median[shape] for shape, times in samples.items() if len(times) >= MIN_REPEATS}
    cost = _fit(shapes, median, repeated, limits)
    num_left_out = len(set(shapes.runs)) - len(samples)
    logger.info(
        "measured verify costs in %.1f s: %.2f ms for %d to %.2f ms for %d tokens (%d sizes, %d with a chunk), %.4f ms a row, %.6f ms a KV token; "
        "at most %.0f%% off from what was measured%s",
        clock() - started, cost.step_ms[0], cost.num_tokens[0], cost.step_ms[-1], cost.num_tokens[-1], len(cost.num_tokens), len(cost.chunk_ms),
        cost.ms_per_row, cost.ms_per_kv_token, 100 * _worst_residual(cost, repeated, shapes.chunks),
        f"; {num_left_out} kinds of rounds were left out for want of time" if num_left_out else "",
    )  # fmt: skip
    return cost


def _fit(shapes: ProfileShapes, median: Mapping[RoundShape, float], repeated: Mapping[RoundShape, float], limits: ProfileLimits) -> VerifyCost:
    ms_per_row = _slope(shapes.rows, repeated, lambda shape: shape.num_rows)
    ms_per_kv_token = _slope(shapes.contexts, repeated, lambda shape: shape.num_kv_tokens)

    def curve(measured: Sequence[RoundShape]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Sizes, and their milliseconds in one row; more tokens never cost less."""
        found = [shape for shape in measured if shape in median]
        times = [max(median[shape] - ms_per_row * (shape.num_rows - 1), _LEAST_MS) for shape in found]
        return tuple(shape.num_tokens for shape in found), tuple(max(times[: index + 1]) for index in range(len(times)))

    chunk_num_tokens, chunk_ms = curve(shapes.chunks)
    max_graph_tokens = limits.graph_sizes[-1] if limits.graph_sizes else 0
    num_tokens, step_ms = curve([*shapes.sizes, *(shape for shape in shapes.chunks if shape.num_tokens > max_graph_tokens)])
    return VerifyCost(
        num_tokens=num_tokens,
        step_ms=step_ms,
        ms_per_kv_token=ms_per_kv_token,
        ms_per_row=ms_per_row,
        max_graph_tokens=max_graph_tokens,
        max_graph_row_tokens=limits.max_row_tokens if chunk_ms else 0,
        chunk_num_tokens=chunk_num_tokens,
        chunk_ms=chunk_ms,
    )


def _slope(pairs: Sequence[Pair], repeated: Mapping[RoundShape, float], amount: Callable[[RoundShape], int]) -> float:
    """Milliseconds that each unit of the amount adds, by least squares; 0 where it was not measured or can't be seen."""
    product = square = 0.0
    for base, more in pairs:
        if base in repeated and more in repeated:
            difference = amount(more) - amount(base)
            product += difference * (repeated[more] - repeated[base])
            square += difference * difference
    return max(0.0, product / square) if square else 0.0


def _worst_residual(cost: VerifyCost, repeated: Mapping[RoundShape, float], chunks: Sequence[RoundShape]) -> float:
    """Largest share by which the table is off for a round that it was made from."""
    step_ms = dict(zip(cost.num_tokens, cost.step_ms, strict=True))
    worst = 0.0
    for shape, measured_ms in repeated.items():
        if shape not in chunks:
            predicted_ms = step_ms[shape.num_tokens] + cost.ms_per_row * (shape.num_rows - 1) + cost.ms_per_kv_token * shape.num_kv_tokens
            worst = max(worst, abs(predicted_ms / measured_ms - 1))
    return worst
