"""Grades: sequences whose drafts were about equally good lately (docs/design.md section 4). Those of one grade are asked for equally many drafts.

A sequence's quality is the running mean of what its drafts' confidences say: accepted tokens to expect by trials to expect, so that drafts which are
accepted at a constant rate have that rate.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from specwire.policy.budget import Floats, Ints

UNKNOWN = 0
"""Of sequences that have had no drafts yet."""
_BORDERS = (0.4, 0.65, 0.85)
_EDGES = np.array(_BORDERS)
PRIOR_QUALITIES = (0.7, 0.25, 0.5, 0.75, 0.9)
"""By grade, before there is anything to go by."""
NUM_GRADES = len(PRIOR_QUALITIES)
RETRY_STEPS = 32
"""A sequence that is asked for fewer drafts than others is asked for as many as they once in so many steps: its text may have changed."""
_BLEND = 0.3
"""Weight of one step in a quality."""


def blend_qualities(qualities: Floats, survival: Floats, num_asked: Ints, *, is_lone: bool = False) -> Floats:
    """Qualities after a step.

    Args:
        qualities: [R] until now; NaN = none yet.
        survival: [R, K] of the drafts that came, negative or 0 where there is none.
        num_asked: [R], 1 or more each.
        is_lone: there was no step with drafts before it for long: what was known counts for nothing.
    """
    present = np.maximum(survival, 0.0)
    expected = present.sum(axis=1)
    # A draft that did not come is one that failed; the last one that was asked for leads to no further trial.
    latest = expected / (1.0 + expected - present[np.arange(len(present)), num_asked - 1])
    return latest if is_lone else np.where(np.isnan(qualities), latest, qualities + _BLEND * (latest - qualities))


def blend_quality(quality: float, survival: Sequence[float], num_asked: int, *, is_lone: bool = False) -> float:
    """The same of one row: of a few rows, sooner."""
    present = [max(one, 0.0) for one in survival]
    expected = sum(present)
    latest = expected / (1.0 + expected - present[num_asked - 1])
    return latest if is_lone or quality != quality else quality + _BLEND * (latest - quality)


def grade_of(quality: float) -> int:
    """From 1 on."""
    return 1 + bisect_right(_BORDERS, quality)


def grades_of(qualities: Floats) -> Ints:
    """[R] from 1 on."""
    return 1 + np.searchsorted(_EDGES, qualities, side="right")
