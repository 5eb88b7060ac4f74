"""What is asked for in a step, and the plan of steps of one kind that says so (docs/design.md section 4)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specwire.policy.budget import Ints


class DraftRequest(NamedTuple):
    """How many drafts to ask for.

    Args:
        num_drafts: K_request, the most that a sequence is asked for; 0 = nobody is asked, the lane runs ahead.
        is_probe: it does not pay by what is known; it is asked for to keep that true.
        fallback: why it is not chosen by cost, but fixed; empty if it is chosen.
        by_grade: drafts that sequences of each grade are asked for; empty: num_drafts for all.
        is_lone: a probe, and nothing is drafted beside it.
        num_asked: sequences that should be asked for more than 0, 1, ... drafts; empty: all for num_drafts.
        is_measured: nobody is asked, though drafts pay by what is known, so that it is measured what such a step takes.
    """

    num_drafts: int
    is_probe: bool = False
    fallback: str = ""
    by_grade: tuple[int, ...] = ()
    is_lone: bool = False
    num_asked: tuple[int, ...] = ()
    is_measured: bool = False


class ProbeRoom(NamedTuple):
    """What probes and spells without drafts depend on.

    Args:
        wait_ms: how long a step may wait for so many drafts, of each of so many sequences.
        is_ready: whether drafters are in step with some sequence that could be asked for.
        is_ending: whether so few tokens are left that leaving off drafting for some steps can't be made up for.
    """

    wait_ms: Callable[[int, int], float]
    is_ready: Callable[[], bool]
    is_ending: Callable[[], bool] = lambda: False


NO_REQUEST = DraftRequest(0)
MEASURED = DraftRequest(0, is_measured=True)


@dataclass(slots=True)
class StepPlan:
    """What is asked for in steps of one kind.

    Args:
        request: the choice; probe: what is asked for in a probe.
        step_ms: that its step should take.
        best_rate: tokens a millisecond, were there no prefill chunks.
        promised: see `RequestPlanner.promise`.
        probe_loss_ms: what a probe costs more than its tokens are worth; probe_wait_ms: and what more it may wait in vain, on average.
        is_hopeless: not even drafts that are all accepted would pay.
        probe_gain: accepted tokens a row from which on drafting as deep as it does would cost nothing.
        is_in_doubt: drafting seems to pay, but what a step without drafts takes is not known well.
        spell_loss_ms: what a few steps without drafts lose.
        most, key: what it was made for; num_uses: how often it was used since; has_news: the forecast has changed since.
    """

    request: DraftRequest = NO_REQUEST
    probe: DraftRequest = NO_REQUEST
    step_ms: float = 0.0
    best_rate: float = 0.0
    promised: float = 0.0
    probe_loss_ms: float = 0.0
    probe_wait_ms: float = 0.0
    is_hopeless: bool = False
    probe_gain: float = 0.0
    is_in_doubt: bool = False
    spell_loss_ms: float = 0.0
    most: int = -1
    key: tuple[int, int, int] = (0, 0, 0)
    num_uses: int = 0
    has_news: bool = False


def request_of(option: Ints, num_by_grade: Ints) -> DraftRequest:
    most = int(option.max())
    if (option == most).all():
        return DraftRequest(most)
    num_asked = (option > np.arange(most)[:, None]) @ num_by_grade
    return DraftRequest(most, by_grade=tuple(option.tolist()), num_asked=tuple(num_asked.tolist()))


def cap_request(request: DraftRequest, most: int) -> DraftRequest:
    """The same with at most so many drafts of a sequence."""
    if request.num_drafts <= most:
        return request
    if not most:
        return NO_REQUEST._replace(fallback=request.fallback)
    return request._replace(num_drafts=most, by_grade=tuple([min(k, most) for k in request.by_grade]), num_asked=request.num_asked[:most])


def are_close(numbers: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Within an eighth of each other."""
    return all(8 * abs(number - other) <= other for number, other in zip(numbers, others, strict=True))
