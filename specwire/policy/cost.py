"""What a verify step should take, by the verifier's own measurement (design section 4)."""

from bisect import bisect_left

from specwire.messages import VerifyCost


def verify_ms(cost: VerifyCost, num_tokens: int, num_rows: int, num_kv_tokens: int) -> float:
    """Milliseconds of a step: step_ms[tokens] + ms_per_row x rows beyond the first + ms_per_kv_token x KV tokens read.

    Up to max_graph_tokens a batch pays for the next measured size; beyond, sizes are interpolated, and past the last one it grows in
    proportion. 0 without a table.
    """
    if not cost.num_tokens:
        return 0.0
    return _token_ms(cost, num_tokens) + cost.ms_per_row * max(0, num_rows - 1) + cost.ms_per_kv_token * num_kv_tokens


def _token_ms(cost: VerifyCost, num_tokens: int) -> float:
    sizes, times = cost.num_tokens, cost.step_ms
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes):
        return times[-1] * num_tokens / sizes[-1]
    if index == 0 or num_tokens <= cost.max_graph_tokens:
        return times[index]
    low, high = sizes[index - 1], sizes[index]
    return times[index - 1] + (times[index] - times[index - 1]) * (num_tokens - low) / (high - low)
