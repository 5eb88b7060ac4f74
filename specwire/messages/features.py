"""Features on their own stream, from a verifier to a drafter."""

from dataclasses import dataclass
from typing import NamedTuple

from specwire.messages.common import RowStatus


class FeatureRange(NamedTuple):
    """Positions first .. first + num_positions - 1 of the sequence of this generation."""

    generation: int
    first: int
    num_positions: int


@dataclass(frozen=True, slots=True)
class FeaturePull:
    """Asks for ranges of one set of features."""

    feature_set_hash: str
    ranges: list[FeatureRange]


@dataclass(frozen=True, slots=True)
class PulledFeatures:
    """The answer.

    Args:
        statuses: one a range: OK; STALE, the sequence is not open any more; BAD, positions that are not computed.
        data: the ranges that are OK, one after the other, [positions, width] in the set's dtype.
    """

    statuses: list[RowStatus]
    data: bytes
