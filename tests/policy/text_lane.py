"""A lane's steps in simulated time over real texts: greedy answers of the default model, so that what ngram drafts, and what of it would be
accepted, is known exactly. Costs are functions; the policy's table need not be true."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from drafter_svc.ngram import longest_suffix_match
from specwire.messages import DraftCost, VerifyCost
from specwire.policy.adaptive import AdaptivePolicy, Kept
from specwire.policy.calibration import Calibrator
from specwire.policy.cost import StepCost, StepMs, StepShape
from specwire.policy.grades import NUM_GRADES, RETRY_STEPS, UNKNOWN, blend_qualities, grades_of
from specwire.policy.step_plan import DraftRequest
from tests.policy.simulated_lane import tell_clock

K_MAX = 8
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MIN_MATCH, _MAX_MATCH = 2, 4
_CHUNK = 28
"""Tokens of a prompt that the prefix cache does not have."""
Curve = Callable[[int], float]


def hop_ms(num_rows: int, num_hops: int) -> float:
    """Twice what is taken for likely before it is measured, and more for each row."""
    return 0.3 + 0.03 * num_rows + 0.8 * num_hops


def draft_ms(num_sequences: int) -> float:
    return 0.03 + 0.015 * num_sequences


class Text:
    """Token ids of a prompt and its answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.tokens = np.array([*prompt, *answer], dtype=np.int32)
        self.num_prompt_tokens = len(prompt)
        self._matches: dict[int, tuple[int, int]] = {}

    def drafts(self, length: int, most: int) -> tuple[int, int, int]:
        """Behind so many tokens: the match's length, drafts, and how many of them come true."""
        if length not in self._matches:
            self._matches[length] = longest_suffix_match(self.tokens[:length], _MIN_MATCH, _MAX_MATCH)
        match, end = self._matches[length]
        if not match:
            return 0, 0, 0
        drafts = self.tokens[end : min(end + most, length)]
        truth = self.tokens[length : length + len(drafts)]
        wrong = np.flatnonzero(drafts[: len(truth)] != truth)
        return match, len(drafts), int(wrong[0]) if len(wrong) else len(truth)


def read_texts(kind: str, num_tokens: int = 72) -> list[Text]:
    """`chat` or `copy`."""
    found = json.loads((Path(__file__).parent / "data" / "texts.json").read_text())[kind]
    return [Text(prompt, answer[:num_tokens]) for prompt, answer in found]


@dataclass(slots=True)
class _Running:
    text: Text
    length: int
    quality: float = np.nan
    graded_step: int = 0

    @property
    def grade(self) -> int:
        return UNKNOWN if np.isnan(self.quality) else int(grades_of(np.array([self.quality]))[0])


@dataclass(slots=True)
class TextLane:
    """Closed loops of texts.

    Args:
        true_ms: what a round of so many tokens takes.
        table: what the verifier says that it takes.
        noise: of the times, as a standard deviation of the logarithm.
        overhead: what a step with drafts takes longer than its parts, as a share of it.
    """

    true_ms: Curve
    table: Curve
    noise: float = 0.03
    overhead: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    runs_ahead: bool = True
    num_steps: int = 0
    clock_ms: float = 0.0
    policy: AdaptivePolicy = field(init=False)

    def __post_init__(self) -> None:
        verify = VerifyCost(_SIZES, tuple(map(self.table, _SIZES)))
        drafts = tuple(DraftCost(k, n, draft_ms(n)) for n in _SIZES[:5] for k in (1, K_MAX))
        self.policy = AdaptivePolicy(StepCost.from_tables(verify, drafts), Calibrator(K_MAX), K_MAX)

    def throughput(self, texts: Sequence[Text], num_at_once: int, num_texts: int, k: int | None) -> float:
        """Tokens a millisecond of so many texts, in turn, with a fixed K or, where it is None, as the policy chooses."""
        waiting = [texts[index % len(texts)] for index in range(num_texts)][::-1]
        running: list[_Running] = []
        num_tokens, milliseconds, self.runs_ahead = 0, 0.0, True
        while waiting or running:
            new = [waiting.pop() for _ in range(min(len(waiting), num_at_once - len(running)))]
            step_ms, emitted = self._step(running, len(new), k)
            milliseconds += step_ms
            num_tokens += emitted + len(new)
            running += [_Running(text, text.num_prompt_tokens + 1) for text in new]
            running = [each for each in running if each.length < len(each.text.tokens)]
        return num_tokens / milliseconds

    def _step(self, running: list[_Running], num_new: int, fixed: int | None) -> tuple[float, int]:
        """Milliseconds and tokens of those that decode."""
        self.num_steps += 1
        number, num_rows = len(running), len(running) + num_new
        shape = StepShape(number + num_new * _CHUNK, num_rows, 0, _CHUNK if num_new else 1, 0, (number,), self.runs_ahead)
        grades = np.array([each.grade for each in running], dtype=np.int64)
        request = DraftRequest(fixed or 0)
        if fixed is None and number:
            request = self.policy.choose_request(self.num_steps, shape, num_rows, K_MAX, lambda: np.bincount(grades, minlength=NUM_GRADES))
        k, num_kept, num_asked = request.num_drafts if number else 0, np.zeros(number, dtype=np.int64), ()
        accepted, kept, learn = num_kept, None, None
        if k:
            num_kept, accepted, num_asked, kept, learn = self._draft(running, request, shape, grades, is_fixed=fixed is not None)
        num_accepted, budget = self._commit(running, accepted), int(num_kept.sum())
        verify = self.true_ms(shape.num_tokens + budget) * float(np.exp(self.noise * self.rng.standard_normal()))
        hops, drafting = hop_ms(num_rows, 2 if k else 1), draft_ms(number) if k else 0.0
        bubble = min(verify, hop_ms(num_rows, 1)) if k and self.runs_ahead else 0.0
        self.runs_ahead = not k
        whole_ms = (verify + hops + drafting) * (1.0 + self.overhead) if k else max(verify, hops)
        if fixed is None and number:
            taken = shape._replace(num_requested=k, num_asked=num_asked)
            self.policy.cost.observe(budget, taken, StepMs(verify, drafting, hops))
            self.clock_ms += whole_ms
            known_ms = tell_clock(self.policy.cost, self.num_steps, self.clock_ms, taken, budget, kept)
            if learn is not None:
                learn(known_ms)
        return whole_ms + bubble, num_accepted

    def _draft(
        self, running: list[_Running], request: DraftRequest, shape: StepShape, grades: np.ndarray, *, is_fixed: bool
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, ...], Kept | None, Callable[[float], None] | None]:
        """Drafts verified and accepted by row, sequences asked for more than 0, 1, ... drafts, the choice, and what learns of it."""
        asks = np.array(request.by_grade or (request.num_drafts,) * NUM_GRADES)[grades]
        asks[[self.num_steps - each.graded_step >= RETRY_STEPS for each in running]] = request.num_drafts
        found = [each.text.drafts(each.length, ask) for each, ask in zip(running, asks, strict=True)]
        offered, true = np.array([drafts for _, drafts, _ in found]), np.array([right for _, _, right in found])
        num_asked = tuple(int((asks > j).sum()) for j in range(request.num_drafts))
        if is_fixed:
            return offered, true, num_asked, None, None
        rows = np.flatnonzero(asks)
        scores = np.repeat([match / (match + 1) for match, _, _ in found], offered)
        group = self.policy.calibrator.group("ngram", is_greedy=True)
        priced = shape._replace(num_requested=request.num_drafts, num_asked=request.num_asked)
        kept = self.policy.choose_kept(request, scores, offered[rows], np.full(len(rows), group), priced, shape.num_rows)
        old = np.array([running[row].quality for row in rows])
        for row, quality in zip(rows, blend_qualities(old, kept.survival, asks[rows], is_lone=request.is_lone), strict=True):
            running[row].quality, running[row].graded_step = float(quality), self.num_steps
        num_kept = np.zeros(len(running), dtype=np.int64)
        num_kept[rows] = kept.num_kept
        accepted = np.minimum(true, num_kept)
        return num_kept, accepted, num_asked, kept, partial(self.policy.observe, kept, asks[rows], grades[rows], accepted[rows])

    @staticmethod
    def _commit(running: list[_Running], accepted: np.ndarray) -> int:
        total = 0
        for each, number in zip(running, accepted.tolist(), strict=True):
            emitted = min(1 + number, len(each.text.tokens) - each.length)
            each.length += emitted
            total += emitted
        return total
