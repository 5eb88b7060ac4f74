"""Whole steps by the clock: what they take beside what their parts should add up to (docs/design.md section 4).

The parts of a step are what services and coordinator measure of themselves: plan, drafting, hops, verification, commit. What else makes it longer is
in none of them: streams to clients, other processes on the same cores, an event loop that is busy, parts that depend on what no table knows. So there
are two more factors, one for steps that run ahead and one for those in lockstep, by the tokens of the round:

    run-ahead    time from commit to commit = factor x parts
    lockstep     time from commit to commit = parts + (factor - 1) x base, where base is what the parts would take if no draft were verified

In lockstep most of what no part shows does not depend on how many drafts are verified: were all of the step multiplied, each draft would seem dearer
than it is, and too few were verified (7% were lost so in simulation, 16 sequences with 3 ms on top of 8).

Of steps with drafts, behind each other, that time is the whole step; of steps that run ahead it is the period. A probe between steps that run ahead
counts only where there was nothing better for long, and with what the step after it took longer: what follows the commit of its tokens. Steps in
a row are put together, since two answers may be committed at once.

Steps that run ahead soon after prefill chunks are believed little: drafters compute prompts then, and streams begin. While the lane drafts, what is
known of them ages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from specwire.policy.budget import Ints
from specwire.policy.correction import PredictionErrors
from specwire.policy.shape import Floats, ShapeCorrection

_FORGETTING = 0.01
"""As four steps of a part: what is measured is that of some steps in a row."""
_STEP_DEVIATION, _LEVEL_DEVIATION = 0.1, 0.3
"""What no part shows differs less from size to size than tables do that are wrong, and is seldom more than some tenths of a step."""
_MIN_RUN_AHEAD = 2
"""Periods that say something."""
_STALE_STEPS = 128
"""After so many steps without two of them in a row a single step in lockstep counts, too: it is planned once nothing is in flight."""
_NUM_COLD = 16
"""Steps in lockstep until their parts' own factors are about right."""
_LEAST = 0.1
"""Factor that a step counts for at least, however short it was."""
_AGEING = 4e-4
"""Share of its prior that returns to the price of steps that run ahead with each step in lockstep: after 250 of them it may be 10% off."""
_UNSETTLED_DEVIATION = 0.25
"""Of steps that run ahead soon after prefill chunks, when drafters are told of sequences and compute their prompts, and streams begin; and of single
steps in lockstep, whose drafters may be told of sequences just then."""
_FEW, _MANY = 8, 4
"""The first measurements of a size are of single steps in lockstep, the later ones of so many steps."""


class StepKind(Enum):
    """What the time from commit to commit says of a step."""

    RUN_AHEAD = "run_ahead"
    LOCKSTEP = "lockstep"
    OTHER = "other"
    """Nothing: it has prefill chunks, or no drafter answered."""


@dataclass(slots=True)
class _Stretch:
    """Steps of one kind in a row, of about the same size."""

    kind: StepKind = StepKind.OTHER
    num_rows: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    clock_ms: float = 0.0
    parts_ms: float = 0.0
    base_ms: float = 0.0
    is_settled: bool = True


class StepClock:
    """The factors of one lane's whole steps.

    Attributes:
        run_ahead, lockstep: by tokens of the round.
        errors: of predictions with the factors of their time.
        elapsed_ms: from the commit before to the last one, whatever these steps were; 0 where the lane had nothing to do meanwhile.
    """

    __slots__ = (
        "_counts", "_kind", "_last_ns", "_num_cold", "_paired_step", "_step", "_stretch", "elapsed_ms", "errors", "lockstep", "run_ahead",
    )  # fmt: skip

    def __init__(self) -> None:
        self.run_ahead = ShapeCorrection(_FORGETTING, _STEP_DEVIATION, _LEVEL_DEVIATION)
        self.lockstep = ShapeCorrection(_FORGETTING, _STEP_DEVIATION, _LEVEL_DEVIATION)
        self.errors = PredictionErrors()
        self._last_ns = self._step = self._paired_step = 0
        self.elapsed_ms = 0.0
        self._num_cold = _NUM_COLD
        self._kind = StepKind.OTHER
        self._stretch = _Stretch()
        self._counts: dict[tuple[StepKind, int], int] = {}

    @property
    def is_cold(self) -> bool:
        """The first steps in lockstep are to be compared with what their parts took, not with what they should have taken: what tables are wrong by
        would be counted twice once the parts' factors have followed."""
        return self._num_cold > 0

    def pause(self) -> None:
        """The lane has nothing to do: the time until the next commit is no step's."""
        self._last_ns = 0

    def in_lockstep(self, parts_ms: Floats, num_tokens: int) -> Floats:
        """Milliseconds [n] of steps whose parts should take parts_ms [n]: of the first one with num_tokens tokens, none of them a draft, of the
        others with one token more each."""
        factors = self.lockstep.up_to(num_tokens + len(parts_ms) - 1)[num_tokens : num_tokens + len(parts_ms)]
        return parts_ms + parts_ms[0] * (factors - 1.0)

    def whole_in_lockstep(self, parts_ms: Floats, base_ms: Floats | float, num_tokens: Ints) -> Floats:
        """Milliseconds [..., n] of steps with num_tokens [n] tokens, whose parts should take parts_ms [..., n], and base_ms [..., 1] or one number if
        no draft were verified."""
        largest = int(num_tokens.max()) if len(num_tokens) else 0
        return parts_ms + base_ms * (self.lockstep.up_to(largest)[num_tokens] - 1.0)

    def committed(self, step: int, kind: StepKind, now_ns: int) -> float:
        """A step has been committed. Returns the milliseconds that it took, where that can be said; else 0.

        Args:
            step: its number; behind one that was left out nothing can be said.
            now_ns: of a clock that is never set.
        """
        last_ns, before, is_next = self._last_ns, self._kind, step == self._step + 1
        self._last_ns, self._kind, self._step = now_ns, kind, step
        self.elapsed_ms = (now_ns - last_ns) / 1e6 if last_ns and is_next else 0.0
        if not last_ns or not is_next or kind is StepKind.OTHER:
            return 0.0
        if before is kind:
            if kind is StepKind.LOCKSTEP:
                self._paired_step = step
        elif kind is StepKind.RUN_AHEAD or step - self._paired_step < _STALE_STEPS:
            return 0.0
        return self.elapsed_ms

    def observe(
        self,
        kind: StepKind,
        clock_ms: float,
        num_rows: int,
        num_tokens: int,
        price: Callable[[], tuple[float, float]],
        *,
        is_settled: bool = True,
    ) -> tuple[float, float] | None:
        """What `committed` said of a step, in order; may come later. Returns predicted and measured milliseconds of a step, the mean of some, where
        that has become known.

        Args:
            num_rows, num_tokens: of the round.
            price: what its parts should take, and the base, in milliseconds; of steps that run ahead both are the same.
            is_settled: nothing was begun lately that may still take the peers' or the coordinator's time, and the step is none of a kind by itself.
        """
        told, stretch = None, self._stretch
        if stretch.num_steps and (kind is not stretch.kind or num_rows != stretch.num_rows):
            told = self._end()
        if not clock_ms:
            return told
        stretch = self._stretch
        stretch.kind, stretch.num_rows, stretch.is_settled = kind, num_rows, stretch.is_settled and is_settled
        stretch.num_steps += 1
        stretch.num_tokens += num_tokens
        stretch.clock_ms += clock_ms
        self._num_cold -= kind is StepKind.LOCKSTEP and self._num_cold > 0
        if kind is StepKind.LOCKSTEP or stretch.num_steps == _MIN_RUN_AHEAD:  # those that run ahead are alike: one price is enough
            parts_ms, base_ms = price()
            stretch.parts_ms += parts_ms
            stretch.base_ms += base_ms
        most = _MANY if kind is StepKind.RUN_AHEAD or self._counts.get((kind, num_tokens.bit_length()), 0) >= _FEW else 1
        return self._end() if stretch.num_steps >= most else told

    def _end(self) -> tuple[float, float] | None:
        """Learns from the steps in a row."""
        stretch, self._stretch = self._stretch, _Stretch()
        number, kind = stretch.num_steps, stretch.kind
        if kind is StepKind.RUN_AHEAD and number < _MIN_RUN_AHEAD:
            return None
        num_prices = number if kind is StepKind.LOCKSTEP else 1
        parts_ms, base_ms = stretch.parts_ms / num_prices, stretch.base_ms / num_prices
        clock_ms, num_tokens = stretch.clock_ms / number, stretch.num_tokens // number
        correction = self.run_ahead if kind is StepKind.RUN_AHEAD else self.lockstep
        predicted_ms = parts_ms + (correction.at(num_tokens) - 1.0) * base_ms
        place = kind, num_tokens.bit_length()
        self._counts[place] = self._counts.get(place, 0) + 1
        self.errors.observe(predicted_ms, clock_ms)
        least_ms = _LEAST * base_ms
        deviation = 0.0 if stretch.is_settled else _UNSETTLED_DEVIATION
        correction.observe(num_tokens, base_ms, max(base_ms + clock_ms - parts_ms, least_ms), deviation=deviation)
        if kind is StepKind.LOCKSTEP:
            self.run_ahead.age(_AGEING * number)
        return predicted_ms, clock_ms
