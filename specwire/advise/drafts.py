"""What answers say of drafts: tokens and verified drafts a step, by how many are asked for. Pure; numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specwire.bench.record import RequestRecord
from specwire.bench.workload import Prompt
from specwire.policy.adaptive import lay_out
from specwire.policy.budget import Floats, Ints, survivals
from specwire.policy.calibration import Calibrator, Scores

_MAX_ROWS = 20_000
_CALIBRATED_ROWS = 256


@dataclass(frozen=True, slots=True)
class AnswerDrafts:
    """One answer's steps after its first token, which comes without drafts.

    Args:
        num_drafts, num_accepted: of each step that verified drafts, in order.
        scores: the drafter's raw ones, of all these drafts.
        num_plain: steps that verified none.
        weight: how much the answer counts.
    """

    num_drafts: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    num_plain: int = 0
    weight: float = 1.0

    @classmethod
    def of(cls, prompt: Prompt, record: RequestRecord) -> "AnswerDrafts":
        """Of a request that asked for the record of its verifications."""
        assert record.spec is not None, f"request {record.index} ended without statistics"
        report = record.drafts
        num_plain = max(0, record.spec.num_steps - 1 - record.spec.num_drafts)
        if report is None:
            return cls(num_plain=num_plain, weight=prompt.weight)
        return cls(tuple(report.num_draft_tokens), tuple(report.num_accepted_tokens), tuple(report.confidences), num_plain, prompt.weight)


@dataclass(frozen=True, slots=True)
class DraftYield:
    """Of a sequence's step, by how many drafts it is asked for: entry K, from 0 on.

    Args:
        tokens: that it emits.
        share: of steps that verify drafts; a drafter need not find any.
        drafts: that those steps verify.
    """

    tokens: tuple[float, ...]
    share: tuple[float, ...]
    drafts: tuple[float, ...]


def expected_yield(answers: Sequence[AnswerDrafts], most: int) -> DraftYield:
    """What K = 0..most would have brought, from answers that were asked for `most` drafts.

    Whether the draft of a token is right depends on the text before it, not on where a step began: so the record says for nearly every token
    whether its draft would be accepted, and a walk over it with steps of K drafts gives the steps that K takes. Rates by position alone would
    take K = 1 for worse than it is, since with a larger K fewer steps begin inside of passages that are easily guessed. What the record does
    not know, tokens behind drafts that were all accepted, counts with the share of drafts that are accepted after others were.
    """
    follow_rate = _follow_rate(answers)
    all_tokens = sum(answer.weight * (sum(answer.num_accepted) + len(answer.num_accepted) + answer.num_plain) for answer in answers)
    tokens, share, drafts = [1.0], [0.0], [0.0]
    outcomes = [_outcomes(answer, most, follow_rate) for answer in answers]
    for k in range(1, most + 1):
        plain = drafted = verified = 0.0
        for answer, known in zip(answers, outcomes, strict=True):
            plain += answer.weight * answer.num_plain
            if answer.num_drafts:
                num_steps = answer.weight * _num_steps(known, k)
                drafted += num_steps
                verified += num_steps * sum(min(k, count) for count in answer.num_drafts) / len(answer.num_drafts)
        tokens.append(all_tokens / (plain + drafted) if plain + drafted else 1.0)
        share.append(drafted / (plain + drafted) if plain + drafted else 0.0)
        drafts.append(verified / drafted if drafted else 0.0)
    return DraftYield(tuple(tokens), tuple(share), tuple(drafts))


def synthetic_yield(answers: Sequence[AnswerDrafts], most: int) -> DraftYield:
    """As `expected_yield`, where acceptance is configured by position, and the text says nothing: from the shares of drafts at each position
    that were accepted when all before them were."""
    num_steps = sum(answer.weight * (len(answer.num_drafts) + answer.num_plain) for answer in answers)
    rows = [(answer.weight, *row) for answer in answers for row in zip(answer.num_drafts, answer.num_accepted, strict=True)]
    num_drafted = sum(weight for weight, _, _ in rows)
    survival = share = num_drafted / num_steps if num_steps else 0.0
    tokens, drafts = [1.0], [0.0]
    for position in range(most):
        observed = sum(weight for weight, offered, accepted in rows if min(offered, accepted + 1) > position)
        survival *= sum(weight for weight, _, accepted in rows if accepted > position) / observed if observed else 0.0
        tokens.append(tokens[-1] + survival)
        drafts.append(sum(weight * min(position + 1, offered) for weight, offered, _ in rows) / num_drafted if num_drafted else 0.0)
    return DraftYield(tuple(tokens), (0.0, *[share] * most), tuple(drafts))


def calibrated_survivals(answers: Sequence[AnswerDrafts], most: int, *, seed: int = 0) -> Floats:
    """[R, most] the probability that a draft and all before it are accepted, as adaptive verification sees it: from the drafter's scores, calibrated
    with these answers' outcomes. -1 where there was no draft. Of many steps a sample of 20,000, by weight."""
    rows: list[tuple[Sequence[float], int]] = []
    weights: list[float] = []
    for answer in answers:
        start = 0
        for offered, accepted in zip(answer.num_drafts, answer.num_accepted, strict=True):
            rows.append((answer.scores[start : start + offered], accepted))
            start += offered
        rows += [((), 0)] * answer.num_plain
        weights += [answer.weight] * (len(rows) - len(weights))
    if not rows:
        return np.full((1, most), -1.0)
    rng = np.random.default_rng(seed)
    shares = np.array(weights) / sum(weights)
    chosen = rng.choice(len(rows), size=min(len(rows), _MAX_ROWS), p=shares) if len(set(weights)) > 1 else rng.permutation(len(rows))[:_MAX_ROWS]
    scores, num_offered = [rows[index][0] for index in chosen], np.array([len(rows[index][0]) for index in chosen])
    num_accepted = np.array([rows[index][1] for index in chosen])
    laid_out = lay_out(np.array([score for row in scores for score in row]), num_offered, most)
    return survivals(_calibrate(laid_out, num_offered, num_accepted), num_offered)


def _calibrate(scores: Scores, num_offered: Ints, num_accepted: Ints) -> Floats:
    calibrator = Calibrator(scores.shape[1])
    group = calibrator.group("", is_greedy=True)
    for start in range(0, len(scores), _CALIBRATED_ROWS):
        part = slice(start, start + _CALIBRATED_ROWS)
        groups = np.full(len(scores[part]), group)
        calibrator.observe(calibrator.calibrate(scores[part], groups), num_offered[part], num_accepted[part])
    return calibrator.calibrate(scores, np.full(len(scores), group)).confidences


def _outcomes(answer: AnswerDrafts, most: int, follow_rate: float) -> list[float]:
    """The probability that a token's draft is accepted, by token of the steps that had drafts: 1 or 0 where the record knows it."""
    known: list[float] = []
    for offered, accepted in zip(answer.num_drafts, answer.num_accepted, strict=True):
        known += [1.0] * accepted
        # A drafter that offered less than it was asked for had nothing more.
        known.append(follow_rate if accepted == offered >= most else 0.0)
    return known


def _num_steps(outcomes: Sequence[float], k: int) -> float:
    """Steps of k drafts that emit all of these tokens, to be expected: each emits its accepted drafts and one more token."""
    begins = [0.0] * (len(outcomes) + k + 1)  # probability that a step begins with this token
    begins[0] = 1.0
    for start in range(len(outcomes)):
        reached = begins[start]
        for token in range(start, start + k):
            if not reached:
                break
            is_accepted = outcomes[token] if token < len(outcomes) else 0.0
            begins[token + 1] += reached * (1.0 - is_accepted)
            reached *= is_accepted
        begins[start + k + 1] += reached
    return sum(begins[: len(outcomes)])


def _follow_rate(answers: Sequence[AnswerDrafts]) -> float:
    """Share of drafts that are accepted, given that the one before them in the same step was."""
    observed = accepted = 0.0
    for answer in answers:
        for offered, count in zip(answer.num_drafts, answer.num_accepted, strict=True):
            observed += answer.weight * max(0, min(offered, count + 1) - 1)
            accepted += answer.weight * max(0, count - 1)
    if observed:
        return accepted / observed
    rows = [(answer.weight, count) for answer in answers for count in answer.num_accepted]
    total = sum(weight for weight, _ in rows)
    return sum(weight for weight, count in rows if count) / total if total else 0.0
