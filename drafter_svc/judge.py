"""What drafts of a model and of look-ups are worth, learned from the text that came in their place."""

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specwire.policy.budget import Floats
from specwire.policy.calibration import Calibrator

from .method import Drafts

_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""
_NUM_LEVELS = 8
_OPTIMISM = 4.0
"""Accepted drafts of the model that are assumed for each level and position before any was seen: it is asked until it is known."""
_DECAY = 1 - 1 / 512
"""Of what is known of a level at each new row: the latest 512 rows count."""


def num_expected(drafts: Drafts) -> float:
    """Accepted tokens to be expected, taking the scores for probabilities: the sum of their running products."""
    return sum(itertools.accumulate(drafts.scores, operator.mul))


class Outcome(NamedTuple):
    """Drafts of one method, and how many of them were compared with the text until the first that differed, and how many were equal."""

    scores: Sequence[float]
    group: int
    num_verified: int
    num_accepted: int


class Judged(NamedTuple):
    """Drafts whose scores are probabilities, and how many of them should be accepted by these."""

    drafts: Drafts
    expected: float


def compare(drafts: Drafts, group: int, token_ids: Sequence[int]) -> Outcome:
    """Drafts and the tokens that were committed in their place, whoever drafted these."""
    num_verified = min(len(drafts.token_ids), len(token_ids))
    num_accepted = 0
    while num_accepted < num_verified and drafts.token_ids[num_accepted] == token_ids[num_accepted]:
        num_accepted += 1
    return _new(Outcome, (drafts.scores, group, num_verified, num_accepted))


class Judge:
    """Scores of several methods on one scale, by method, position and whether the sequence is greedy.

    Args:
        num_positions: most drafts at once (K).
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._calibrator = Calibrator(num_positions)

    def group(self, method: str, *, is_greedy: bool) -> int:
        """Of a method's drafts."""
        return self._calibrator.group(method, is_greedy=is_greedy)

    def calibrate(self, drafts: Sequence[Drafts], groups: Sequence[int]) -> list[Judged]:
        """The same drafts, whose scores are probabilities now, and what is expected of them."""
        lengths = np.array([len(run.token_ids) for run in drafts])
        if not lengths.any():
            return [_new(Judged, (run, 0.0)) for run in drafts]
        confidences = self._calibrator.calibrate(self._lay_out([run.scores for run in drafts]), np.array(groups)).confidences
        products = np.cumprod(confidences, axis=1) * (np.arange(self._num_positions) < lengths[:, None])
        return [
            _new(Judged, (_new(Drafts, (run.status, run.token_ids, row[: len(run.token_ids)], run.proposals)), expected))
            for run, row, expected in zip(drafts, confidences.tolist(), products.sum(axis=1).tolist(), strict=True)
        ]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            drafts = self._calibrator.calibrate(self._lay_out([one.scores for one in outcomes]), np.array([one.group for one in outcomes]))
            self._calibrator.observe(drafts, np.array([one.num_verified for one in outcomes]), np.array([one.num_accepted for one in outcomes]))

    def _lay_out(self, scores: Sequence[Sequence[float]]) -> Floats:
        pad = [-1.0] * self._num_positions
        return np.array([[*row, *pad[len(row) :]] for row in scores])


class ModelRecord:
    """How many tokens of a model's drafts were right where a look-up expected a certain share of what was asked for: text that repeats itself is
    easier for a model, too."""

    def __init__(self, num_positions: int) -> None:
        self._trials = np.zeros((2 * _NUM_LEVELS, num_positions))
        self._accepted = np.zeros((2 * _NUM_LEVELS, num_positions))

    def level(self, expected: float, num_drafts: int, *, is_greedy: bool) -> int:
        """Of a sequence whose look-up expects so many of num_drafts tokens."""
        return _NUM_LEVELS * is_greedy + min(int(_NUM_LEVELS * expected / max(1, num_drafts)), _NUM_LEVELS - 1)

    def num_expected(self) -> list[list[float]]:
        """By level and K - 1: accepted tokens of K drafts of the model."""
        rates = (self._accepted + _OPTIMISM) / (self._trials + _OPTIMISM)
        return [list(row) for row in np.cumsum(np.cumprod(rates, axis=1), axis=1).tolist()]

    def learn(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Of the model's drafts, each with the level that it was asked at."""
        if not outcomes:
            return
        levels = np.array([level for level, _ in outcomes])
        verified, accepted = (np.array(values)[:, None] for values in zip(*[one[-2:] for _, one in outcomes], strict=True))
        positions = np.arange(self._trials.shape[1])
        at_level = levels == np.arange(len(self._trials))[:, None]
        decay = _DECAY ** at_level.sum(axis=1, keepdims=True)
        for counts, num_positions in ((self._trials, np.minimum(verified, accepted + 1)), (self._accepted, accepted)):
            counts *= decay
            counts += at_level.astype(np.float64) @ (positions < num_positions)


def best(choices: Sequence[Drafts]) -> Drafts:
    """That of which most is expected; on ties the first one."""
    return max(choices, key=num_expected)
