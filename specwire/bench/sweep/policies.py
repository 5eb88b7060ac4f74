"""The ways to choose K that are compared, and what each means to a stack."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specwire.speculative_config import SpeculativeConfig

Schedule = tuple[tuple[int, int, int], ...]
_LAST = 1 << 20
"""Batch sizes up to which a schedule goes: more than any stack has."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One of them.

    Args:
        name: none, fixed-5, dynamic, adaptive.
        k: of none (0) and the fixed ones; None = it is chosen step by step.
    """

    name: str
    k: int | None = None

    @classmethod
    def fixed(cls, k: int) -> "Policy":
        return cls(f"fixed-{k}", k)


NONE = Policy("none", 0)
DYNAMIC = Policy("dynamic")
ADAPTIVE = Policy("adaptive")


def speculation_of(policy: Policy, config: SpeculativeConfig, schedule: Schedule | None) -> SpeculativeConfig:
    """A coordinator's speculation under a policy; peers keep theirs, which is the ceiling.

    Args:
        config: of the stack.
        schedule: for DYNAMIC.
    """
    if policy is NONE:
        return replace(config, method=None, model=None, enable_adaptive_verification=False, num_speculative_tokens_per_batch_size=None)
    if policy is ADAPTIVE:
        return replace(config, enable_adaptive_verification=True, num_speculative_tokens_per_batch_size=None)
    if policy.k is not None:
        schedule = ((1, _LAST, policy.k),)
    assert schedule is not None, f"the policy {policy.name} has no schedule"
    return replace(config, enable_adaptive_verification=False, num_speculative_tokens_per_batch_size=schedule)


def best_schedule(throughput: Mapping[int, Mapping[int, float]], num_lanes: int) -> Schedule:
    """K by batch size of one lane, from what fixed K gave: at each measured concurrency the best one, in between by the nearer one (on a
    logarithmic scale).

    Args:
        throughput: by concurrency and K.
    """
    best: dict[int, int] = {}
    for concurrency, rates in sorted(throughput.items()):
        best.setdefault(max(1, concurrency // num_lanes), max(rates, key=lambda k: rates[k]))
    sizes = list(best)
    ends = [max(left, int((left * right) ** 0.5)) for left, right in itertools.pairwise(sizes)] + [_LAST]
    starts = [1, *(end + 1 for end in ends[:-1])]
    return _merged([(start, end, best[size]) for start, end, size in zip(starts, ends, sizes, strict=True)])


def _merged(entries: Sequence[tuple[int, int, int]]) -> Schedule:
    merged: list[tuple[int, int, int]] = []
    for start, end, k in entries:
        if merged and merged[-1][2] == k:
            merged[-1] = merged[-1][0], end, k
        else:
            merged.append((start, end, k))
    return tuple(merged)
