"""Everything that was found, and what it means in words."""

from dataclasses import dataclass

import numpy as np

from specwire.advise.decision import AdaptiveGain, Range, adaptive_gains, choose_schedule, fixed_rates, spread_sizes
from specwire.advise.drafts import DraftYield
from specwire.advise.steps import StepPoint, StepTimes
from specwire.policy.budget import Floats

_MAX_SPREAD = 0.1
_MAX_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Measured:
    """What the decision is made of.

    Args:
        model_id: the target; method: of the drafters.
        max_num_seqs: largest batch of a lane.
        drafts: tokens and verified drafts a step, by K.
        survival: [R, K], see `specwire.advise.drafts.calibrated_survivals`.
        times: of steps; None where nothing was ever drafted.
        points: that were measured.
        is_synthetic: acceptance was configured.
        reservations: what limited the measurement.
    """

    model_id: str
    method: str
    max_num_seqs: int
    drafts: DraftYield
    survival: Floats
    times: StepTimes | None
    points: tuple[StepPoint, ...]
    is_synthetic: bool = False
    reservations: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """The largest K that was measured."""
        return len(self.drafts.tokens) - 1


@dataclass(frozen=True, slots=True)
class Advice:
    """What to configure.

    Args:
        schedule: ranges (start, end, K) of batch sizes, without gaps.
        rates: tokens a millisecond [N, K + 1] of 1..N sequences; N is the largest batch size that is known.
        adaptive: gains of adaptive verification over the best fixed K.
        use_adaptive: it is better by more than min_gain in the geometric mean of these sizes.
        notes: what the user should know of it, one sentence each.
    """

    schedule: tuple[Range, ...]
    rates: Floats
    adaptive: tuple[AdaptiveGain, ...]
    use_adaptive: bool
    min_gain: float
    notes: tuple[str, ...]

    @property
    def is_off(self) -> bool:
        """Drafting does not pay at any batch size."""
        return not self.use_adaptive and not any(k for _, _, k in self.schedule)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes to show."""
        return spread_sizes(len(self.rates))

    def k_at(self, num_sequences: int) -> int:
        """K of the schedule."""
        return next(k for start, end, k in self.schedule if start <= num_sequences <= end)

    def best_drafting_k(self, num_sequences: int) -> int:
        """K > 0 that is the best for so many sequences; 0 if there is none."""
        row = self.rates[min(num_sequences, len(self.rates)) - 1]
        return int(row[1:].argmax()) + 1 if len(row) > 1 else 0

    def gain_of(self, num_sequences: int, k: int) -> float:
        """Throughput with K over that without drafts, minus 1; 0 where no step had so many."""
        row = self.rates[min(num_sequences, len(self.rates)) - 1]
        return float(row[k] / row[0] - 1) if k < len(row) else 0.0

    def gain_at(self, num_sequences: int) -> float:
        """Throughput by the schedule over that without drafts, minus 1."""
        row = self.rates[num_sequences - 1]
        return float(row[self.k_at(num_sequences)] / row[0] - 1)

    def best_gain(self) -> tuple[int, int, float]:
        """(batch size, K, gain over K = 0) of the fixed K > 0 that gains most; K = 0 if there is none."""
        if self.rates.shape[1] < 2:
            return 1, 0, 0.0
        gains = self.rates[:, 1:] / self.rates[:, :1] - 1
        size, k = np.unravel_index(int(np.argmax(gains)), gains.shape)
        return int(size) + 1, int(k) + 1, float(gains[size, k])

    @property
    def headline(self) -> str:
        """The advice in a sentence."""
        size, k, gain = self.best_gain()
        if self.is_off and not k:
            return "leave speculation off: the drafter offered nothing for these prompts"
        sequences = "1 sequence" if size == 1 else f"{size} sequences"
        if self.is_off:
            return f"leave speculation off: the best that drafts do is {gain:+.1%} (K = {k} at {sequences}), and --min-gain is {self.min_gain:.1%}"
        parts = [f"K = {k} for {start} to {end}" if start < end else f"K = {k} for {start}" for start, end, k in self.schedule]
        if len(parts) > _MAX_SHOWN:
            parts = [parts[0], f"... in {len(parts)} ranges", parts[-1]]
        text = f"{', '.join(parts)} sequences"
        if self.use_adaptive:
            mean = float(np.exp(np.mean([np.log1p(gain.over_fixed) for gain in self.adaptive]))) - 1
            return f"adaptive verification: {mean:+.1%} on average over the best fixed K of each batch size; without it {text}"
        return text


def make_advice(measured: Measured, min_gain: float, seen_most: int) -> Advice:
    """The decision.

    Args:
        seen_most: the K that was asked for; `measured` has fewer where no step verified more.
    """
    if measured.times is None:
        rare = ("drafts came while acceptance was measured, but none while steps were: they are too rare",) if measured.most else ()
        return Advice(((1, measured.max_num_seqs, 0),), np.ones((measured.max_num_seqs, 1)), (), False, min_gain, (*measured.reservations, *rare))
    times = measured.times
    notes = list(measured.reservations)
    max_num_seqs = measured.max_num_seqs
    if times.unknown:
        max_num_seqs = min(max_num_seqs, times.largest_measured)
        notes.append(f"{times.unknown}: times between measured steps are interpolated, and beyond {max_num_seqs} sequences nothing is known")
    elif times.largest_measured < max_num_seqs:
        notes.append(f"steps were measured up to {times.largest_measured} sequences; beyond, their times are those of the services' tables")
    spread = max(point.spread for point in measured.points)
    if spread > max(min_gain, _MAX_SPREAD):
        notes.append(f"equal steps took times up to {spread:.0%} apart: leave the machine to the stack, or measure more often (--repeats)")
    if measured.most < seen_most:
        notes.append(f"no step verified more than {measured.most} drafts, though {seen_most} were asked for")
    rates = fixed_rates(measured.drafts, times, max_num_seqs)
    schedule = choose_schedule(rates, min_gain)
    if rates[0].argmax() == measured.most:
        notes.append(f"K = {measured.most} is the largest that was measured: raise num_speculative_tokens and measure again, it may gain more")
    if measured.is_synthetic:
        notes.append("acceptance is synthetic: the advice is as good as the configured rates are")
    gains = adaptive_gains(measured.survival, times, spread_sizes(max_num_seqs))
    use_adaptive = bool(np.mean([np.log1p(gain.over_fixed) for gain in gains]) >= np.log1p(min_gain))
    return Advice(tuple(schedule), rates, tuple(gains), use_adaptive, min_gain, tuple(notes))
