"""Step 4: the same requests with and without drafts, at a low and at a high rate. What was measured, and what it says; pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """One run.

    Args:
        tpot_ms: median time of a token after the first one; ttft_ms: median time to the first token.
        tokens_per_s: that were served.
        tpots_ms: of each request.
    """

    tpot_ms: float
    ttft_ms: float
    tokens_per_s: float
    tpots_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class OnlineRate:
    """Pairs of runs at one rate, one after the other.

    Args:
        name: low or high; requests_per_s: that arrived, num_requests in each run.
        num_speculative_tokens: K of the runs with drafts.
        pairs: (without drafts, with them).
    """

    name: str
    requests_per_s: float
    num_requests: int
    num_speculative_tokens: int
    pairs: tuple[tuple[OnlineRun, OnlineRun], ...]

    @property
    def tpot_gains(self) -> list[float]:
        """Share of a token's time that drafts saved, by pair."""
        return [1 - drafted.tpot_ms / plain.tpot_ms for plain, drafted in self.pairs]

    @property
    def throughput_gains(self) -> list[float]:
        """Share of tokens a second that drafts added, by pair."""
        return [drafted.tokens_per_s / plain.tokens_per_s - 1 for plain, drafted in self.pairs]

    @property
    def tpot_gain(self) -> float:
        return statistics.median(self.tpot_gains)

    @property
    def throughput_gain(self) -> float:
        return statistics.median(self.throughput_gains)

    @property
    def noise(self) -> float:
        """Half of how far the pairs' savings are apart; with one pair nothing is known of it, and it is 0."""
        return (max(self.tpot_gains) - min(self.tpot_gains)) / 2

    @property
    def throughput_noise(self) -> float:
        """The same of tokens a second."""
        return (max(self.throughput_gains) - min(self.throughput_gains)) / 2

    def spread_of_requests(self) -> float:
        """Standard deviation of requests' times per token with drafts, by their mean."""
        times = [tpot for _, drafted in self.pairs for tpot in drafted.tpots_ms]
        return statistics.stdev(times) / statistics.mean(times) if len(times) > 1 else 0.0

    def sentence(self) -> str:
        """It in words."""
        plain = statistics.median(plain.tpot_ms for plain, _ in self.pairs)
        drafted = statistics.median(drafted.tpot_ms for _, drafted in self.pairs)
        rates = [statistics.median(run.tokens_per_s for run in runs) for runs in zip(*self.pairs, strict=True)]
        noise = f" (pairs {2 * self.noise:.0%} apart)" if len(self.pairs) > 1 else " (one pair: nothing is known of noise)"
        return (
            f"{self.name} rate, {self.requests_per_s:.2f} requests/s, K = {self.num_speculative_tokens}: a token takes {drafted:.2f} ms instead of "
            f"{plain:.2f} ms, {in_words(self.tpot_gain)} in the median pair{noise}; {rates[1]:.1f} instead of {rates[0]:.1f} tokens/s, "
            f"{self.throughput_gain:+.1%}"
        )


def in_words(tpot_gain: float) -> str:
    """What share of a token's time is saved, or lost."""
    return f"{abs(tpot_gain):.1%} {'less' if tpot_gain >= 0 else 'more'}"


def settle(name: str, measured: float, noise: float, expected: float, thresholds: Sequence[float]) -> tuple[float, str]:
    """What a gain is taken for, and what there is to say of it: as measured, unless a threshold is within its noise; then what measured steps let
    expect, since those are compared with steps right beside them, as far as it is within that noise, too.

    Args:
        name: of the gain; measured, noise: by pairs of runs; thresholds: that decide.
    """
    near = [threshold for threshold in thresholds if abs(measured - threshold) < noise]
    if not near:
        return measured, ""
    counts = min(max(expected, measured - noise), measured + noise)
    shares = " and ".join(f"{threshold:+.0%}" for threshold in near)
    return counts, (
        f"{name}: {measured:+.1%} is nearer to {shares} than the pairs of runs are apart ({2 * noise:.0%}), and measured steps let expect "
        f"{expected:+.1%}, so that {counts:+.1%} counts; leave the machine to the stack, and measure longer (--online-seconds, --repeats)"
    )
