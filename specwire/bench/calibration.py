"""How well a drafter's raw scores say what will be accepted, from the record of each verification.

A draft token is observed if all drafts before it were accepted: behind the first rejection nothing can be known of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specwire.messages import DraftReport

NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class Observations:
    """Draft tokens whose fate is known, one entry each.

    Attributes:
        positions: in the draft, from 0.
        scores: the drafter's raw ones; NaN where it sent none.
        accepted: whether the target took it.
    """

    positions: NDArray[np.int64]
    scores: NDArray[np.float64]
    accepted: NDArray[np.bool_]

    @classmethod
    def of(cls, reports: Iterable[DraftReport]) -> "Observations":
        positions: list[int] = []
        scores: list[float] = []
        accepted: list[bool] = []
        for report in reports:
            start = 0
            for num_drafts, num_accepted in zip(report.num_draft_tokens, report.num_accepted_tokens, strict=True):
                num_observed = min(num_drafts, num_accepted + 1)
                positions += range(num_observed)
                scores += report.confidences[start : start + num_observed]
                accepted += [position < num_accepted for position in range(num_observed)]
                start += num_drafts
        return cls(np.array(positions, np.int64), np.array(scores, np.float64), np.array(accepted, np.bool_))

    def at(self, position: int) -> "Observations":
        """Those at one position."""
        chosen = self.positions == position
        return Observations(self.positions[chosen], self.scores[chosen], self.accepted[chosen])

    @property
    def rate(self) -> float:
        """Share that was accepted: at one position, the probability of acceptance given that all before it were."""
        return float(self.accepted.mean()) if len(self.accepted) else 0.0


@dataclass(frozen=True, slots=True)
class ScoreBin:
    """Scores in [low, high); the last bin includes 1."""

    low: float
    high: float
    num_observed: int
    num_accepted: int
    mean_score: float

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_observed


@dataclass(frozen=True, slots=True)
class Calibration:
    """Scores beside what was accepted.

    Attributes:
        error: expected calibration error: |mean score - rate| of each bin, weighted by its observations (Naeini et al. 2015).
        num_unscored: observations without a score, which are left out.
        bins: of equal width, empty ones left out.
    """

    num_observed: int
    num_unscored: int
    error: float
    bins: tuple[ScoreBin, ...]


def calibrate(observations: Observations, num_bins: int = NUM_BINS) -> Calibration:
    """Bins the scores."""
    scored = ~np.isnan(observations.scores)
    scores, accepted = observations.scores[scored], observations.accepted[scored]
    indices = np.clip((scores * num_bins).astype(np.int64), 0, num_bins - 1)
    bins = []
    for index in np.unique(indices).tolist():
        chosen = indices == index
        bins.append(
            ScoreBin(index / num_bins, (index + 1) / num_bins, int(chosen.sum()), int(accepted[chosen].sum()), float(scores[chosen].mean()))
        )  # fmt: skip
    error = sum(entry.num_observed * abs(entry.mean_score - entry.rate) for entry in bins) / len(scores) if len(scores) else 0.0
    return Calibration(len(scores), int((~scored).sum()), error, tuple(bins))
