"""Measures at start what a verify step costs, for policies that choose how many drafts to verify (design section 4)."""

import logging
import statistics
import time
from typing import NamedTuple

from specwire.engine.batch import Segment
from specwire.engine.runner import ModelRunner
from specwire.messages import VerifyCost

logger = logging.getLogger(__name__)

_NUM_REPEATS = 5
_MIN_REPEATS = 3
"""Differences of fewer repeats are noise."""
_CONTEXT_TOKENS = 1024
_NUM_ROWS = 16


class _Shape(NamedTuple):
    """A step of num_rows rows with num_tokens tokens each behind context tokens."""

    num_tokens: int
    num_rows: int = 1
    context: int = 0


def measure_verify_cost(runner: ModelRunner, max_num_tokens: int, max_context: int, budget_s: float = 1.5) -> VerifyCost:
    """Times forward passes with the logits of all their tokens, each up to 5 times, before any sequence is open; takes medians.

    step_ms is one row of 1, 2, 4, ... tokens without context; ms_per_row compares 16 rows of a token with a row of 16;
    ms_per_kv_token compares a token behind a context with one without.

    Args:
        runner: its KV cache is overwritten.
        max_num_tokens: most tokens of a step.
        max_context: most tokens of the context.
        budget_s: once it is spent, nothing is repeated, and larger rows are left out, which the log says.
    """
    started = time.monotonic()
    capacity = runner.kv_cache.num_blocks * runner.kv_cache.block_size
    sizes = [1 << i for i in range(min(max_num_tokens, capacity).bit_length())]
    behind_context = _Shape(1, context=min(_CONTEXT_TOKENS, max_context, capacity - 1))
    many_rows = _Shape(1, num_rows=min(_NUM_ROWS, runner.kv_cache.num_blocks, sizes[-1]))
    shapes = dict.fromkeys([_Shape(1), behind_context, many_rows, _Shape(many_rows.num_rows), *map(_Shape, sizes)])

    _step_ms(runner, _Shape(1))  # first-call costs
    samples = {_Shape(1): [_step_ms(runner, _Shape(1))]}
    for repeat in range(_NUM_REPEATS):
        for shape in shapes:
            if time.monotonic() - started < budget_s and (repeat == 0 or shape in samples):
                samples.setdefault(shape, []).append(_step_ms(runner, shape))
    median = {shape: statistics.median(times) for shape, times in samples.items()}
    repeated = {shape: median[shape] for shape, times in samples.items() if len(times) >= _MIN_REPEATS}

    measured = [size for size in sizes if _Shape(size) in median]
    step_ms = [max(median[_Shape(smaller)] for smaller in measured if smaller <= size) for size in measured]  # more tokens never cost less
    cost = VerifyCost(
        num_tokens=tuple(measured),
        step_ms=tuple(step_ms),
        ms_per_kv_token=_slope(repeated, _Shape(1), behind_context, behind_context.context),
        ms_per_row=_slope(repeated, _Shape(many_rows.num_rows), many_rows, many_rows.num_rows - 1),
    )
    logger.info(
        "measured verify costs in %.1f s (%d times each): %s ms for %s tokens, %.4f ms a row, %.6f ms a KV token%s",
        time.monotonic() - started, len(samples[_Shape(1)]) - 1, ", ".join(f"{ms:.1f}" for ms in step_ms), ", ".join(map(str, measured)),
        cost.ms_per_row, cost.ms_per_kv_token, "" if measured == sizes else f"; larger steps up to {sizes[-1]} tokens left out",
    )  # fmt: skip
    return cost


def _slope(repeated: dict[_Shape, float], base: _Shape, more: _Shape, difference: int) -> float:
    """Milliseconds that each unit of the difference adds; 0 where it was not measured or can't be seen."""
    return max(0.0, repeated[more] - repeated[base]) / difference if difference and base in repeated and more in repeated else 0.0


def _step_ms(runner: ModelRunner, shape: _Shape) -> float:
    num_blocks = -(-(shape.context + shape.num_tokens) // runner.kv_cache.block_size)
    tokens = [0] * shape.num_tokens
    segments = [Segment(tokens, shape.context, range(row * num_blocks, (row + 1) * num_blocks)) for row in range(shape.num_rows)]
    started = time.perf_counter()
    batch = runner.batch(segments)
    logits = runner.logits(runner.forward(batch), range(batch.num_tokens))
    logits.argmax(dim=1).tolist()  # waits for the device
    return (time.perf_counter() - started) * 1e3
