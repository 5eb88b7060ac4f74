"""What `pareto` compares: policies, mixes of requests and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.known_rates import KnownRate
from benchmarks.gpu.schedule import Schedule, advised_schedule
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.window import Window
from specwire.advise.steps import StepPoint
from specwire.policy.cost import StepCost

MIXES: dict[str, tuple[float, ...]] = {"uniform": (0.8,), "mixed": (0.9, 0.3)}
"""Probability that a draft is accepted once those before it are; requests take turns."""
FIXED = (1, 2, 3, 5, 7)
SIGMA = 0.5
"""Noise of confidences that all bars are for."""
NUM_DRAFT_TOKENS = 7


@dataclass(frozen=True, slots=True)
class Policy:
    """One of them.

    Args:
        schedule: K by batch size; the ceiling of adaptive verification.
    """

    name: str
    schedule: Schedule
    is_adaptive: bool = False

    @classmethod
    def fixed(cls, k: int, max_num_seqs: int) -> "Policy":
        """The same K at every batch size; 0 is `none`."""
        return cls(f"K={k}" if k else "none", ((1, max_num_seqs, k),))


@dataclass(frozen=True, slots=True)
class ParetoSizes:
    """How much is measured.

    Args:
        sizes: of batches; its steps are how many tokens a request may have.
        num_settle: tokens of a sequence before a window.
        num_measured: tokens of a sequence in a window, on average, by number of sequences: up to so many sequences, so many tokens.
        warm_s: for how long adaptive verification learns, unmeasured, before its first window of a number of sequences; half of it for what is only
            shown.
        median_length, spread, longest: lengths of a rollout: exp(normal(log(median), spread)), cut at the longest.
    """

    sizes: Sizes
    num_settle: int
    num_measured: tuple[tuple[int, int], ...]
    warm_s: float
    median_length: int
    spread: float
    longest: int

    def measured(self, count: int) -> int:
        return next((number for most, number in self.num_measured if count <= most), self.num_measured[-1][1])


FULL = ParetoSizes(
    Sizes((1, 4, 16, 32, 64, 128, 256), 512, 768, 16384, NUM_DRAFT_TOKENS, 3),
    num_settle=8,
    num_measured=((1, 384), (4, 192), (16, 128), (64, 96), (256, 48)),
    warm_s=1.0,
    median_length=80,
    spread=0.8,
    longest=512,
)
TINY = ParetoSizes(
    Sizes((1, 4), 20, 600, 64, NUM_DRAFT_TOKENS, 2), num_settle=3, num_measured=((256, 40),), warm_s=0.1, median_length=8, spread=0.8, longest=24
)


@dataclass(slots=True)
class Points:
    """Steps of fixed K that windows have shown: what `specwire advise` measures."""

    by_shape: dict[tuple[int, int], StepPoint] = field(default_factory=dict)

    def add(self, k: int, window: Window, context_len: int) -> None:
        """Of one window, in which all sequences had K drafts."""
        self.add_step(k, window.count, window.step_ms, context_len)

    def add_step(self, k: int, count: int, step_ms: float, context_len: int) -> None:
        """Of `count` sequences that all had K drafts."""
        self.by_shape[count, k] = StepPoint(count, k, 1.0, float(k), step_ms, context_len)

    def advise(self, cost: StepCost, rates: Sequence[float], max_num_seqs: int, context_len: int) -> Schedule:
        """The schedule that `specwire advise` makes of these steps for such a mix of requests."""
        survivals = [sum(rate**position for rate in rates) / len(rates) for position in range(1, NUM_DRAFT_TOKENS + 1)]
        return advised_schedule(cost, survivals, list(self.by_shape.values()), max_num_seqs, context_len)


def known_rates(mix: str, sigma: float, count: int) -> list[KnownRate]:
    """Of each of so many requests."""
    rates = MIXES[mix]
    return [KnownRate(rates[index % len(rates)], sigma) for index in range(count)]
