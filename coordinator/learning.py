"""What adaptive verification learns of a lane's steps: what became of their drafts, what their parts took, and how long they were by the clock. It
learns once the step's next message is out."""

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specwire.messages import RoundTiming, RowStatus, VerifyResult
from specwire.policy.adaptive import AdaptivePolicy, Kept, merge_kept
from specwire.policy.budget import Ints
from specwire.policy.clock import StepKind
from specwire.policy.cost import StepCost, StepMs, StepShape

from .choice import Choice
from .metrics import step_parts

if TYPE_CHECKING:
    from .slots import Round

_MAX_OBSERVED = 128
"""Rows of one step that they learn from."""
_OBSERVED_AT_ONCE, _MAX_PENDING = 16, 4
"""Rows that are enough to learn from at once, and steps of fewer that wait for each other."""
_FEW_TIMED, _TIMED_STRIDE = 64, 4
"""Observed steps of about one size whose parts are learned from, and of how many later ones one is: by then the clock corrects what they say."""
_SETTLING_STEPS = 16
"""Steps after one with prefill chunks in which drafters and streams may still be busy with what has begun."""
_OK = RowStatus.OK


class _Outcome(NamedTuple):
    """What `AdaptivePolicy.observe` is told of a step."""

    kept: Kept
    num_asked: Ints
    grades: Ints
    num_accepted: Ints
    clock_ms: float


class _LoneProbe(NamedTuple):
    """The last step, a probe that nothing is drafted beside.

    Args:
        elapsed_ms: until its commit; is_clocked: the factor by the clock is learned from it, too.
    """

    choice: Choice
    round_: "Round"
    measured: StepMs | None
    elapsed_ms: float
    is_clocked: bool


class Learner:
    """Of one lane, while it is connected.

    Args:
        cost: of its steps.
        policy: chooses by what is learned.
    """

    def __init__(self, cost: StepCost, policy: AdaptivePolicy) -> None:
        self.cost = cost
        self.policy = policy
        self._next_observed = 0
        self._finished_ns = 0
        self._pending: list[_Outcome] = []
        self._probe: _LoneProbe | None = None
        self._num_timed, self._num_rows_timed = 0, 0
        self._num_since_chunks = 0

    def observe(self, choice: Choice, round_: "Round", result: VerifyResult, tell: Callable[[float, float], None]) -> None:
        """See `Choice.observe`. Learns from what became of the step's drafts, and how long its parts took, of one step of a few where there are many
        rows in each; and how long whole steps take, of all."""
        timing, now_ns, kind = result.timing, time.monotonic_ns(), _kind_of(choice)
        clock_ms = self.cost.clock.committed(choice.step, kind, now_ns)
        self._settle_probe(choice, round_, kind, tell)
        # A round that ran ahead was at the verifier before the one before it had ended.
        started_ns, self._finished_ns = max(timing.started_ns, self._finished_ns), timing.finished_ns
        self._num_since_chunks = self._num_since_chunks + 1 if choice.shape.longest_row == 1 else 0
        is_cold = kind is StepKind.LOCKSTEP and self.cost.clock.is_cold
        is_lone = choice.request.is_lone and round_.plan.is_drafting and self.cost.clock.elapsed_ms > 0
        is_clocked, clock_ms = (clock_ms > 0, 0.0) if is_lone else (False, clock_ms)
        if not (choice.is_observed or is_cold):
            if clock_ms:
                once_sent(lambda: self._observe_clock(choice, round_, None, kind, clock_ms, tell))
            return
        if choice.is_observed and (kept := choice.kept) is not None:
            rows = _rows_of_round(round_, choice.rows)
            once_sent(lambda: self._observe_drafts(choice, kept, rows, result, clock_ms))
        is_timed = timing.received_ns > 0 and _was_computed(choice, round_, result) and self._is_timed(choice)
        measured = _measure(choice, round_, timing, started_ns, now_ns) if is_timed else None
        if is_lone:
            self._probe = _LoneProbe(choice, round_, measured, self.cost.clock.elapsed_ms, is_clocked)
        once_sent(lambda: self._observe_cost(choice, round_, measured, kind, clock_ms, tell))

    def _settle_probe(self, choice: Choice, round_: "Round", kind: StepKind, tell: Callable[[float, float], None]) -> None:
        """What a probe took is known with the step after it: what followed its commit, and the pipeline's being empty, are in that one's time."""
        probe, self._probe, elapsed_ms = self._probe, None, self.cost.clock.elapsed_ms
        if probe is None or not elapsed_ms or kind is not StepKind.RUN_AHEAD:
            return
        shape = _as_sent(probe.choice.shape, probe.round_)
        took_ms = probe.elapsed_ms + elapsed_ms - self.cost.plain_ms(_as_sent(choice.shape, round_))
        self.policy.settle_probe(took_ms - self.cost.plain_ms(shape), is_answered=probe.choice.kept is not None)
        if probe.is_clocked:
            clock_ms = max(took_ms - self.cost.bubble_ms(shape), 0.0)
            once_sent(lambda: self._observe_clock(probe.choice, probe.round_, probe.measured, StepKind.LOCKSTEP, clock_ms, tell))

    def _is_timed(self, choice: Choice) -> bool:
        """Whether it is learned what the parts of an observed step took."""
        num_rows = choice.shape.num_rows.bit_length()
        if num_rows != self._num_rows_timed:
            self._num_timed, self._num_rows_timed = 0, num_rows
        self._num_timed += 1
        return self._num_timed <= _FEW_TIMED or not self._num_timed % _TIMED_STRIDE or choice.request.is_probe or choice.request.is_measured

    def _observe_cost(
        self, choice: Choice, round_: "Round", measured: StepMs | None, kind: StepKind, clock_ms: float, tell: Callable[[float, float], None]
    ) -> None:
        drafts, self.cost.drafts = self.cost.drafts, choice.curves  # the next step may have others
        try:
            if measured is not None and not self.cost.unknown:
                self.cost.observe(choice.budget, _with_asks(_as_sent(choice.shape, round_), round_), measured)
        finally:
            self.cost.drafts = drafts
        self._observe_clock(choice, round_, measured, kind, clock_ms, tell)

    def _observe_clock(
        self, choice: Choice, round_: "Round", measured: StepMs | None, kind: StepKind, clock_ms: float, tell: Callable[[float, float], None]
    ) -> None:
        if self.cost.unknown:
            return
        shape, kept, parts_ms = _as_sent(choice.shape, round_), choice.kept, (0.0, 0.0)
        if kind is StepKind.LOCKSTEP and kept is not None:
            if not choice.request.is_probe:
                parts_ms = kept.parts_ms
            elif choice.draft_ms:  # of drafters that may have to catch up first
                parts_ms = self.cost.lockstep_parts_ms(choice.budget, shape, choice.draft_ms)
            if self.cost.clock.is_cold:
                is_known = measured is not None and measured.verify_ms > 0 < measured.draft_ms
                parts_ms = (sum(measured), parts_ms[1]) if measured is not None and is_known else (0.0, 0.0)
            clock_ms *= parts_ms[0] > 0 < parts_ms[1]
        is_ahead = kind is StepKind.RUN_AHEAD
        whole = self.cost.clock.observe(
            kind,
            clock_ms,
            shape.num_rows,
            shape.num_tokens + choice.budget,
            lambda: (self.cost.plain_parts_ms(shape),) * 2 if is_ahead else parts_ms,
            is_settled=not choice.request.is_lone if kind is StepKind.LOCKSTEP else self._num_since_chunks >= _SETTLING_STEPS,
        )
        if whole is not None:
            tell(*whole)

    def _observe_drafts(self, choice: Choice, kept: Kept, rows: Rows[int], result: VerifyResult, clock_ms: float) -> None:
        """Of many rows some, in turn."""
        num_asked, grades = choice.num_asked, choice.grades
        stride = -(-len(rows) // _MAX_OBSERVED)
        self._next_observed = (self._next_observed + 1) % stride
        if stride > 1:
            taken = slice(self._next_observed, None, stride)
            kept, rows, num_asked, grades = kept.take(taken), rows[taken], num_asked[taken], grades[taken]
        answers = [result.rows[row] for row in rows]
        num_accepted = np.array([answer.num_accepted if answer.status is _OK else -1 for answer in answers])
        num_accepted[num_accepted > kept.num_kept] = -1
        pending = self._pending
        if pending and (pending[0].kept.request != kept.request or pending[0].kept.survival.shape[1] != kept.survival.shape[1]):
            self._learn()
        self._pending.append(_Outcome(kept, num_asked, grades, num_accepted, clock_ms))
        if kept.request.is_probe or sum([len(each.num_asked) for each in self._pending]) >= _OBSERVED_AT_ONCE or len(self._pending) >= _MAX_PENDING:
            self._learn()

    def _learn(self) -> None:
        """From all steps that wait for it."""
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            self.policy.observe(*pending[0])
            return
        clocks = [each.clock_ms or each.kept.cost_ms for each in pending]
        self.policy.observe(
            merge_kept([each.kept for each in pending]),
            np.concatenate([each.num_asked for each in pending]),
            np.concatenate([each.grades for each in pending]),
            np.concatenate([each.num_accepted for each in pending]),
            sum(clocks),
        )


def once_sent(learn: Callable[[], None]) -> None:
    """Learns while the peers work: what the step is about to send goes out in the event loop's next turn, this comes in the one after it. In the
    order of the calls, and before an answer to what is sent can come; the next plan may still know nothing of it."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, learn)


def _as_sent(shape: StepShape, round_: "Round") -> StepShape:
    """Sequences that had ended before have no row."""
    if len(round_.rows) == shape.num_rows:
        return shape
    return shape._replace(num_tokens=sum([row.token_budget or 1 for row in round_.rows]), num_rows=len(round_.rows))


def _with_asks(shape: StepShape, round_: "Round") -> StepShape:
    return shape._replace(num_asked=_count_asks(round_.plan.num_drafts)) if shape.num_requested else shape


def _rows_of_round(round_: "Round", rows: Rows[int]) -> Rows[int]:
    """Where these decode rows of the plan are in its round: sequences that had ended before it was sent have no row in it."""
    decodes = round_.plan.decodes
    if len(round_.rows) == len(decodes) + len(round_.plan.chunks):
        return rows
    places = {id(slot.sequence): row for row, slot in enumerate(round_.slots)}
    return [places[id(decodes[row])] for row in rows]


def _count_asks(num_drafts: list[int]) -> list[int]:
    """Sequences that were asked for more than 0, 1, ... drafts."""
    numbers = np.bincount(num_drafts)
    return (len(num_drafts) - np.cumsum(numbers)[:-1]).tolist()


def _kind_of(choice: Choice) -> StepKind:
    shape = choice.shape
    if shape.longest_row > 1:
        return StepKind.OTHER
    if shape.num_requested:
        return StepKind.OTHER if choice.kept is None else StepKind.LOCKSTEP
    return StepKind.RUN_AHEAD


def _was_computed(choice: Choice, round_: "Round", result: VerifyResult) -> bool:
    """Whether the verifier has computed all tokens that the step is priced by: what the prefix cache has of a chunk takes no time. False, too, of
    chunks at a verifier that does not tell."""
    return choice.shape.longest_row == 1 or result.num_padded_tokens >= _as_sent(choice.shape, round_).num_tokens + choice.budget


def _measure(choice: Choice, round_: "Round", timing: RoundTiming, started_ns: int, now_ns: int) -> StepMs:
    """What the parts of a step took that is committed now."""
    parts = step_parts(round_.plan.times, timing, now_ns)
    # A clock that is set meanwhile counts only as far as it fits into the round trip.
    verify_ms = min(max(0, timing.finished_ns - started_ns), parts.forward) / 1e6
    hop_ms = (parts.plan + parts.verify_hop + parts.commit) / 1e6
    if not choice.shape.num_requested:
        return StepMs(verify_ms, 0.0, hop_ms)
    draft_ms = min(choice.draft_ms, parts.propose / 1e6)
    return StepMs(verify_ms, draft_ms, hop_ms + parts.propose / 1e6 - draft_ms if draft_ms else 0.0)
