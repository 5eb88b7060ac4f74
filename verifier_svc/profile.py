"""Measures at start what a verify step costs, for policies that choose how many drafts to verify (design section 4)."""

import logging
import statistics
import time
from collections.abc import Sequence

from specwire.engine.batch import Segment
from specwire.engine.runner import ModelRunner
from specwire.messages import VerifyCost

logger = logging.getLogger(__name__)

_NUM_REPEATS = 5
_CONTEXT_TOKENS = 1024
_NUM_ROWS = 16


def measure_verify_cost(runner: ModelRunner, max_num_tokens: int, max_context: int, budget_s: float = 1.5) -> VerifyCost:
    """Times forward passes with the logits of all their tokens, the median of 5 each, before any sequence is open.

    step_ms is one row of 1, 2, 4, ... tokens without context; ms_per_row compares 16 rows of a token with a row of 16;
    ms_per_kv_token compares a token behind a context with one without.

    Args:
        runner: its KV cache is overwritten.
        max_num_tokens: largest row timed.
        max_context: most tokens of the context.
        budget_s: once it is spent, larger rows are left out, which the log says.
    """
    started = time.monotonic()
    block_size = runner.kv_cache.block_size
    capacity = runner.kv_cache.num_blocks * block_size

    def step_ms(query_lens: Sequence[int], context: int = 0) -> float:
        num_blocks = -(-(context + max(query_lens)) // block_size)
        segments = [Segment([0] * n, context, range(i * num_blocks, (i + 1) * num_blocks)) for i, n in enumerate(query_lens)]
        return statistics.median(_time_ms(runner, segments) for _ in range(_NUM_REPEATS))

    _time_ms(runner, [Segment([0], 0, [0])])  # first-call costs
    num_rows = min(_NUM_ROWS, runner.kv_cache.num_blocks, max_num_tokens)
    context = min(_CONTEXT_TOKENS, max_context, capacity - 1)
    one = step_ms([1])
    ms_per_kv_token = max(0.0, step_ms([1], context) - one) / context if context else 0.0
    ms_per_row = max(0.0, step_ms([1] * num_rows) - step_ms([num_rows])) / (num_rows - 1) if num_rows > 1 else 0.0
    sizes, times = [1], [one]
    while sizes[-1] * 2 <= min(max_num_tokens, capacity) and time.monotonic() - started < budget_s:
        sizes.append(sizes[-1] * 2)
        times.append(max(times[-1], step_ms([sizes[-1]])))  # monotone, as more tokens never cost less
    logger.info(
        "measured verify costs in %.1f s: %s ms for %s tokens, %.4f ms a row, %.6f ms a KV token%s",
        time.monotonic() - started, ", ".join(f"{ms:.1f}" for ms in times), ", ".join(map(str, sizes)), ms_per_row, ms_per_kv_token,
        "" if sizes[-1] * 2 > min(max_num_tokens, capacity) else f"; larger rows up to {max_num_tokens} left out",
    )  # fmt: skip
    return VerifyCost(tuple(sizes), tuple(times), ms_per_kv_token, ms_per_row)


def _time_ms(runner: ModelRunner, segments: Sequence[Segment]) -> float:
    started = time.perf_counter()
    batch = runner.batch(segments)
    logits = runner.logits(runner.forward(batch), range(batch.num_tokens))
    logits.argmax(dim=1).tolist()  # waits for the device
    return (time.perf_counter() - started) * 1e3
