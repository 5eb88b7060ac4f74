"""Rates of synthetic acceptance, which emits drafts by chance instead of by comparison (for benchmarks)."""

import math
from collections.abc import Sequence
from itertools import pairwise

from specwire.errors import InvalidArgumentError


def check_rates(rates: Sequence[float]) -> None:
    """Raise InvalidArgumentError unless rates are unconditional acceptance rates: in [0, 1] and never rising."""
    for position, rate in enumerate(rates):
        if not 0.0 <= rate <= 1.0:
            raise InvalidArgumentError(f"synthetic_acceptance_rates[{position}] is {rate:g}, but entries must be in [0, 1]; correct it")
    for position, (before, after) in enumerate(pairwise(rates), start=1):
        if after > before:
            raise InvalidArgumentError(
                f"synthetic_acceptance_rates[{position}] is {after:g} after {before:g}, but the rates must be non-increasing: "
                "entry i is the probability that the first i + 1 drafts are all accepted"
            )


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """From P(first i drafts accepted) to P(draft i accepted | those before it were)."""
    check_rates(rates)
    return tuple(after / before if before > 0.0 else 0.0 for before, after in pairwise((1.0, *rates)))


def rates_from_length(length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Unconditional rates whose mean acceptance length (accepted + 1) is `length`, with the least variance.

    Raises:
        InvalidArgumentError: unless 1 <= length <= num_speculative_tokens + 1.
    """
    if not 1.0 <= length <= num_speculative_tokens + 1:
        raise InvalidArgumentError(
            f"synthetic_acceptance_length is {length:g}, but must be in [1, {num_speculative_tokens + 1}] with "
            f"num_speculative_tokens = {num_speculative_tokens}; it counts the target's own token"
        )
    whole = math.floor(length - 1.0)
    return tuple(min(1.0, max(0.0, length - 1.0 - i)) if i <= whole else 0.0 for i in range(num_speculative_tokens))


def rates_from_mean_rate(rate: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Unconditional rates c, c^2, c^3, ... whose mean over the positions is `rate` (accepted / draft tokens).

    Raises:
        InvalidArgumentError: unless 0 <= rate <= 1.
    """
    if not 0.0 <= rate <= 1.0:
        raise InvalidArgumentError(f"synthetic_acceptance_rate is {rate:g}, but must be in [0, 1]; it is accepted / draft tokens")
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection to the last bit: the mean rises with c
        middle = (low + high) / 2
        mean = sum(middle**i for i in range(1, num_speculative_tokens + 1)) / num_speculative_tokens
        low, high = (middle, high) if mean < rate else (low, middle)
    return tuple(high**i for i in range(1, num_speculative_tokens + 1))
