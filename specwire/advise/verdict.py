"""The decision of all five steps. Pure."""

import enum
import itertools
from dataclasses import dataclass

from specwire.advise.advice import Advice
from specwire.advise.online import OnlineRate, settle
from specwire.advise.options import Thresholds


class Verdict(enum.Enum):
    """What to do."""

    STOPPED = "stopped"
    OFF = "off"
    WEIGH = "weigh"
    ON = "on"
    DYNAMIC = "dynamic"
    ADAPTIVE = "adaptive"

    @property
    def is_off(self) -> bool:
        """No drafts."""
        return self in (Verdict.STOPPED, Verdict.OFF)


_WORDS = {
    Verdict.STOPPED: "leave speculation off",
    Verdict.OFF: "leave speculation off",
    Verdict.WEIGH: "weigh it",
    Verdict.ON: "switch speculation on",
    Verdict.DYNAMIC: "switch speculation on with dynamic K",
    Verdict.ADAPTIVE: "switch speculation on with adaptive verification",
}

_MARGIN = 0.05
"""Beyond what drafts can bring; more is said."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why.

    Args:
        num_speculative_tokens: K that was measured online; 0 = none was.
        reasons: one sentence each, with the figures; doubts: what could have decided otherwise.
    """

    verdict: Verdict
    num_speculative_tokens: int
    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """It in a sentence."""
        return f"{_WORDS[self.verdict]}: {self.reasons[0]}"


def stop_early(acceptance_length: float, num_drafts: int, thresholds: Thresholds) -> Decision | None:
    """Step 3: the decision if acceptance alone says no."""
    if not num_drafts:
        return Decision(Verdict.STOPPED, 0, ("the drafter offered nothing for these prompts",))
    if acceptance_length >= thresholds.min_acceptance_length or thresholds.keep_going:
        return None
    reason = f"the mean acceptance length is {acceptance_length:.2f}, and --min-acceptance-length is {thresholds.min_acceptance_length:g}"
    return Decision(Verdict.STOPPED, 0, (f"{reason} (--keep-going measures on nevertheless)",))


@dataclass(frozen=True, slots=True)
class Expected:
    """What the measured steps let expect at a rate.

    Args:
        gain: throughput over that without drafts, minus 1.
        tokens_per_step: with drafts.
    """

    gain: float
    tokens_per_step: float

    @property
    def tpot_gain(self) -> float:
        """Share of a token's time."""
        return 1 - 1 / (1 + self.gain)

    @property
    def most(self) -> float:
        """Share of a token's time that drafts which cost nothing would save."""
        return 1 - 1 / self.tokens_per_step


def decide(advice: Advice, low: OnlineRate, high: OnlineRate, thresholds: Thresholds, expected_low: Expected, expected_high: Expected) -> Decision:
    """Step 4: the decision from what was measured online.

    A token's time must be shorter by min_tpot_gain at the low rate, and neither it nor throughput worse at the high one, to say yes. Where the high
    rate is worse, K must depend on the load: by the schedule that the measured steps give, or by adaptive verification where those say that it is
    better, or that no schedule falls. Figures whose noise could decide give way to what the steps let expect; and no more counts than drafts that
    cost nothing would bring.
    """
    doubts = ["there is one pair of runs at each rate, so that nothing is known of noise (--repeats)"] if len(low.pairs) == 1 else []

    def settled(name: str, measured: float, noise: float, expected: float, most: float, *limits: float) -> float:
        value, doubt = settle(name, measured, noise, expected, limits)
        doubts.extend([doubt] if doubt else [])
        if value > most + _MARGIN:
            tokens = f"{expected_low.tokens_per_step:.2f} tokens a step"
            doubts.append(f"{name}: {value:+.1%} is more than {tokens} can bring, so that {most:+.1%} counts: something else changed, too")
        return min(value, most)

    loss, gain, most_more = -thresholds.max_loss, thresholds.min_gain, expected_low.tokens_per_step - 1
    limits = gain, thresholds.min_tpot_gain
    saved = settled("time per token at the low rate", low.tpot_gain, low.noise, expected_low.tpot_gain, expected_low.most, *limits)
    high_saved = settled("time per token at the high rate", high.tpot_gain, high.noise, expected_high.tpot_gain, expected_high.most, loss)
    more = settled("tokens/s at the high rate", high.throughput_gain, high.throughput_noise, expected_high.gain, most_more, loss)
    low_words = f"drafts {_saves(saved)} of a token's time at the low rate"
    high_words = f"{_saves(high_saved)} at the high one, with {more:+.1%} tokens/s"

    def decision(verdict: Verdict, *reasons: str) -> Decision:
        return Decision(verdict, low.num_speculative_tokens, reasons, tuple(doubts))

    if high_saved < loss or more < loss:
        if saved <= gain:
            return decision(Verdict.OFF, f"{low_words} and {high_words}: neither pays")
        worse = f"{low_words}, but {high_words}: K must fall as the load rises"
        if advice.use_adaptive or not _falls(advice):
            why = "that it is better than a schedule" if advice.use_adaptive else "no schedule that falls"
            return decision(Verdict.ADAPTIVE, worse, f"adaptive verification, since the measured steps say {why}")
        return decision(Verdict.DYNAMIC, worse, f"by the measured steps: {advice.headline}")
    if max(saved, high_saved, more) <= gain:
        return decision(Verdict.OFF, f"{low_words} and {high_words}: all within --min-gain {gain:.0%}")
    if saved >= thresholds.min_tpot_gain:
        return decision(Verdict.ON, f"{low_words} (--min-tpot-gain is {thresholds.min_tpot_gain:.0%}) and {high_words}: not worse")
    least = f"less than --min-tpot-gain {thresholds.min_tpot_gain:.0%}"
    return decision(Verdict.WEIGH, f"{low_words}, {least}, and {high_words}: is that worth a drafter to run and to watch?")


def _saves(share: float) -> str:
    return f"{'save' if share >= 0 else 'cost'} {abs(share):.1%}"


def _falls(advice: Advice) -> bool:
    """The schedule has a smaller K for larger batches."""
    return any(later < earlier for (_, _, earlier), (_, _, later) in itertools.pairwise(advice.schedule))
