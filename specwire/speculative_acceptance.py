"""How drafts are accepted: what goes with which `rejection_sample_method` (docs/design.md section 3)."""

from collections.abc import Sequence
from typing import Any

from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.speculative_method import MODEL_METHODS

REJECTION_ALIASES = {"standard": "strict"}
MEAN_RATE = "synthetic_acceptance_rate"
"""A key beside those of the configuration's fields: the mean rate over all positions."""
_REJECTION_METHODS = ("strict", "probabilistic", "synthetic")
_LATER_METHODS = ("block",)


def check_acceptance(method: Any, rates: Any, length: Any, num_tokens: int, drafting: Sequence[str], *, is_adaptive: bool) -> None:
    """Raise InvalidArgumentError or UnsupportedError unless drafts can be accepted so.

    Args:
        method: rejection_sample_method.
        rates, length: synthetic_acceptance_rates and synthetic_acceptance_length.
        num_tokens: K.
        drafting: the drafting methods.
        is_adaptive: with adaptive verification.
    """
    if method in _LATER_METHODS:
        raise UnsupportedError(f"rejection_sample_method {method!r} is not built; use one of {', '.join(_REJECTION_METHODS)}")
    if method not in _REJECTION_METHODS:
        raise InvalidArgumentError(f"rejection_sample_method is {method!r}, but must be one of {', '.join(_REJECTION_METHODS)}")
    if method == "probabilistic" and is_adaptive:
        raise InvalidArgumentError(
            "rejection_sample_method is probabilistic, but enable_adaptive_verification chooses drafts by their scores, which changes what a "
            "ratio test emits; use strict, or leave enable_adaptive_verification out"
        )
    if method == "probabilistic" and len(drafting) > 1 and not set(drafting).isdisjoint(MODEL_METHODS):
        raise InvalidArgumentError(
            f"rejection_sample_method is probabilistic, but the list {list(drafting)} chooses between drafts that a model drew, which "
            "changes what a ratio test emits; use strict, or one method"
        )
    if method != "synthetic":
        if rates is not None or length is not None:
            raise InvalidArgumentError(
                "synthetic_acceptance_rates and synthetic_acceptance_length need rejection_sample_method synthetic; set it, or remove them"
            )
        return
    if (rates is None) == (length is None):
        raise InvalidArgumentError(
            "rejection_sample_method synthetic needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length"
        )
    if rates is not None:
        check_rates(rates, num_tokens)
    elif not is_number(length, 1, num_tokens + 1):
        raise InvalidArgumentError(f"synthetic_acceptance_length is {length!r}, but must be from 1 to num_speculative_tokens + 1 = {num_tokens + 1}")


def synthetic_rates(rates: tuple[float, ...] | None, length: float | None, num_tokens: int) -> tuple[float, ...]:
    """Unconditional rates p_1..p_K: as given, or of least variance for the given length L = 1 + sum of p_i; none without either."""
    if rates is not None:
        return rates
    if length is None:
        return ()
    return tuple(min(1.0, max(0.0, length - 1.0 - i)) for i in range(num_tokens))


def length_of_mean_rate(rate: Any, num_tokens: int, given: Sequence[str]) -> float:
    """The acceptance length that synthetic_acceptance_rate asks for. Raises InvalidArgumentError for what is no rate, or beside
    other given keys of the kind."""
    if not is_number(rate, 0, 1):
        raise InvalidArgumentError(f"{MEAN_RATE} is {rate!r}, but must be a number in [0, 1]")
    if given:
        raise InvalidArgumentError(f"{MEAN_RATE} is {rate}, but {given[0]} is set too; remove one of them")
    return 1.0 + float(rate) * num_tokens


def check_rates(rates: Sequence[float], num_tokens: int) -> None:
    """Raise InvalidArgumentError unless there are num_tokens rates in [0, 1] that do not increase."""
    if not isinstance(rates, (list, tuple)):
        raise InvalidArgumentError(f"synthetic_acceptance_rates is {rates!r}, but must be a list of {num_tokens} numbers in [0, 1]")
    if len(rates) != num_tokens:
        raise InvalidArgumentError(
            f"synthetic_acceptance_rates has {len(rates)} entries, but num_speculative_tokens is {num_tokens}; give one a position"
        )
    for index, rate in enumerate(rates):
        if not is_number(rate, 0, 1):
            raise InvalidArgumentError(f"synthetic_acceptance_rates[{index}] is {rate!r}, but must be a number in [0, 1]")
        if index and rate > rates[index - 1]:
            raise InvalidArgumentError(
                f"synthetic_acceptance_rates rise from {rates[index - 1]} to {rate} at index {index}, but P(first i all accepted) never rises; "
                "give them in non-increasing order"
            )


def is_number(value: object, low: float, high: float) -> bool:
    """Whether a value is a number from low to high."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidArgumentError unless a value is an integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(f"{name} is {value!r}, but must be an integer from {low} to {high}")
