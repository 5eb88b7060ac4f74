"""A lane's steps in simulated time: costs by a table, acceptance by chance. What is measured are the true costs, which the policy's table need not
have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from specwire.messages import DraftCost, VerifyCost
from specwire.policy.adaptive import AdaptivePolicy, Kept
from specwire.policy.calibration import Calibrator
from specwire.policy.clock import StepKind
from specwire.policy.cost import StepCost, StepMs, StepShape
from specwire.policy.curves import VerifyCurve
from specwire.policy.grades import NUM_GRADES, RETRY_STEPS, UNKNOWN, blend_qualities, grades_of
from specwire.policy.step_plan import DraftRequest

K_MAX = 7
CONTEXT = 576
# All matrix products of an 8b model's step on one H200 (milliseconds by tokens), and reading the KV of a token at 4.3 TB/s.
_TOKENS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_GEMM_MS = (3.97, 4.01, 4.16, 4.26, 4.63, 5.51, 6.03, 9.33, 12.0, 19.2, 23.3, 34.0, 46.0)
_MS_PER_KV_TOKEN = 131_072 / 4.3e9
_BLOCK_SHARE = 0.099  # of the model's weights: one layer and the head
_MODEL_SHARE = 0.165  # a 1b model's
_GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 2049, 32))
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def gemm_ms(num_tokens: int) -> float:
    return float(np.interp(num_tokens, _TOKENS, _GEMM_MS))


VERIFY = VerifyCost(_GRAPH_SIZES, tuple(map(gemm_ms, _GRAPH_SIZES)), _MS_PER_KV_TOKEN, 0.0, _GRAPH_SIZES[-1])
BLOCK = tuple(DraftCost(k, n, _BLOCK_SHARE * gemm_ms(min(n * (k + 1), 2048))) for n in _SEQUENCES for k in (1, 3, 7))
"""One pass of one layer and the head over all positions: its cost hardly depends on K."""
MODEL = tuple(DraftCost(k, n, k * (_MODEL_SHARE * gemm_ms(n) + n * CONTEXT * _MS_PER_KV_TOKEN / 4)) for n in _SEQUENCES for k in (1, 3, 7))
"""K passes of a small model."""


Overhead = Callable[[int, int], float]
"""Milliseconds of a step that no part shows, by sequences and verified drafts; -1 of the latter: it runs ahead."""


def no_overhead(num_sequences: int, num_draft_tokens: int) -> float:
    return 0.0


def uniform(num_sequences: int, rate: float = 0.8) -> np.ndarray:
    return np.full(num_sequences, rate)


def mixed(num_sequences: int) -> np.ndarray:
    return np.where(np.arange(num_sequences) % 2 == 0, 0.9, 0.3)


def shape_of(num_sequences: int, *, leaves_run_ahead: bool = False, k: int = 0) -> StepShape:
    return StepShape(num_sequences, num_sequences, num_sequences * CONTEXT, 1, k, (num_sequences,), leaves_run_ahead)


def expected_tokens(rates: np.ndarray, num_kept: Iterable[int]) -> float:
    """Of a step in which each sequence verifies so many drafts."""
    return len(rates) + sum(float((rate ** np.arange(1, kept + 1)).sum()) for rate, kept in zip(rates, num_kept, strict=True))


def fixed_throughput(draft_cost: tuple[DraftCost, ...], rates: np.ndarray, k: int, overhead: Overhead = no_overhead) -> float:
    """Tokens a millisecond with the same K in all steps."""
    cost = StepCost.from_tables(VERIFY, draft_cost)
    number = len(rates)
    step_ms = float(cost.step_ms(np.array([number * k]), shape_of(number, k=k))[0]) + overhead(number, number * k if k else -1)
    return expected_tokens(rates, [k] * number) / step_ms


def keep(policy: AdaptivePolicy, request: DraftRequest, scores: list[list[float]], groups: list[int], shape: StepShape, number: int) -> Kept:
    """`choose_kept` of rows of scores."""
    flat, num_offered = np.array([score for row in scores for score in row]), np.array([len(row) for row in scores])
    return policy.choose_kept(request, flat, num_offered, np.array(groups), shape, number)


def observe(policy: AdaptivePolicy, kept: Kept, num_asked: list[int], num_accepted: np.ndarray) -> None:
    """Of rows whose grades are not known."""
    policy.observe(kept, np.array(num_asked), np.full(len(num_asked), UNKNOWN), num_accepted)


def tell_clock(cost: StepCost, step: int, now_ms: float, taken: StepShape, num_draft_tokens: int, kept: Kept | None) -> float:
    """A step is committed at that time; `taken` is what it was. Returns what it is known to have taken, or 0."""
    kind = StepKind.OTHER if taken.longest_row > 1 else StepKind.RUN_AHEAD if kept is None else StepKind.LOCKSTEP

    def parts_ms() -> tuple[float, float]:
        if kept is None:
            return (cost.plain_parts_ms(taken),) * 2
        if not kept.request.is_probe:
            return kept.parts_ms
        return cost.lockstep_parts_ms(num_draft_tokens, taken, float(cost.draft_ms(np.array([taken.num_asked]), taken)[0]))

    known_ms = cost.clock.committed(step, kind, round(1e6 * now_ms))
    cost.clock.observe(kind, known_ms, taken.num_rows, taken.num_tokens + num_draft_tokens, parts_ms)
    return known_ms


@dataclass(slots=True)
class SimulatedLane:
    """Steps of one policy.

    Args:
        sigma: noise of the scores' log-odds, which otherwise are those of the true rates.
        has_plain_scores: scores say nothing.
        true_verify: what rounds take, whatever the policy's table says.
        overhead: see `Overhead`.
        jitter: of whole steps, as a standard deviation of the logarithm.
    """

    policy: AdaptivePolicy
    sigma: float
    rng: np.random.Generator
    runs_ahead: bool = True
    num_steps: int = 0
    qualities: np.ndarray = field(default_factory=lambda: np.zeros(0))
    graded: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    has_plain_scores: bool = False
    true_verify: VerifyCurve = field(default_factory=lambda: VerifyCurve(VERIFY))
    overhead: Overhead = no_overhead
    jitter: float = 0.0
    clock_ms: float = 0.0

    @classmethod
    def make(cls, draft_cost: tuple[DraftCost, ...], *, sigma: float = 0.5, seed: int = 0) -> "SimulatedLane":
        policy = AdaptivePolicy(StepCost.from_tables(VERIFY, draft_cost), Calibrator(K_MAX), K_MAX)
        return cls(policy, sigma, np.random.default_rng(seed))

    def step(self, rates: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, int]:
        """Milliseconds, drafts verified and accepted by row, and K_request."""
        number, cost = len(rates), self.policy.cost
        shape = shape_of(number, leaves_run_ahead=self.runs_ahead)
        self.num_steps += 1
        if len(self.qualities) != number:
            self.qualities, self.graded = np.full(number, np.nan), np.zeros(number, dtype=np.int64)
        grades = self.grades
        request = self.policy.choose_request(self.num_steps, shape, number, K_MAX, self.count_grades)
        k = request.num_drafts
        asks = np.array(request.by_grade or (k,) * NUM_GRADES)[grades]
        asks[self.num_steps - self.graded >= RETRY_STEPS] = k
        num_kept = num_accepted = np.zeros(number, dtype=np.int64)
        kept = None
        if k:
            rows = np.flatnonzero(asks)
            offered = asks[rows]
            log_odds = np.log(rates / (1 - rates))[:, None] + self.sigma * self.rng.standard_normal((number, k))
            scores = 1 / (1 + np.exp(-log_odds))
            if self.has_plain_scores:
                scores[:] = 0.5
            group = self.policy.calibrator.group("simulated", is_greedy=False)
            came = scores[rows][np.arange(k) < offered[:, None]]
            kept = self.policy.choose_kept(request, came, offered, np.full(len(rows), group), shape, number)
            self.qualities[rows] = blend_qualities(self.qualities[rows], kept.survival, offered, is_lone=request.is_lone)
            self.graded[rows] = self.num_steps
            num_kept[rows] = kept.num_kept
            run = np.cumprod(self.rng.random((number, k)) < rates[:, None], axis=1).sum(axis=1)
            num_accepted = np.minimum(run, num_kept)
        num_asked = tuple((asks > j).sum() for j in range(k))
        taken = shape._replace(num_requested=k, num_asked=num_asked, leaves_run_ahead=self.runs_ahead and k > 0)
        self.runs_ahead = k == 0
        num_draft_tokens = int(num_kept.sum())
        verify_ms = self.true_verify.table_ms_of(number + num_draft_tokens, number, number * CONTEXT)
        measured = StepMs(verify_ms, float(cost.draft_ms(np.array([num_asked]), shape)[0]), cost.hops.table_ms(number, 2 if k else 1))
        cost.observe(num_draft_tokens, taken, measured)
        true_cost = StepCost(self.true_verify, cost.drafts, cost.hops)
        priced = taken._replace(leaves_run_ahead=False)
        whole_ms = float(true_cost.step_ms(np.array([num_draft_tokens]), priced)[0]) + self.overhead(number, num_draft_tokens if k else -1)
        if self.jitter:
            whole_ms *= float(np.exp(self.jitter * self.rng.standard_normal()))
        bubble_ms = true_cost.bubble_ms(shape) if taken.leaves_run_ahead else 0.0
        self.clock_ms += whole_ms
        known_ms = tell_clock(cost, self.num_steps, self.clock_ms, taken, num_draft_tokens, kept)
        if kept is not None:
            self.policy.observe(kept, offered, grades[rows], num_accepted[rows], known_ms)
        return whole_ms + bubble_ms, num_kept, num_accepted, k

    @property
    def grades(self) -> np.ndarray:
        return np.where(np.isnan(self.qualities), UNKNOWN, grades_of(self.qualities))

    def count_grades(self) -> np.ndarray:
        return np.bincount(self.grades, minlength=NUM_GRADES)

    def throughput(self, rates: np.ndarray, num_steps: int) -> float:
        """Expected tokens a millisecond over so many steps."""
        tokens = milliseconds = 0.0
        for _ in range(num_steps):
            step_ms, num_kept, _, _ = self.step(rates)
            milliseconds += step_ms
            tokens += expected_tokens(rates, num_kept)
        return tokens / milliseconds
