"""Pulls of features survive the wire, and columns that do not fit together are refused."""

import pytest

from specwire.errors import InvalidArgumentError
from specwire.messages import FeaturePull, FeatureRange, PulledFeatures, RowStatus
from specwire.v1 import verifier_pb2 as pb
from specwire.wire import features


@pytest.mark.parametrize("ranges", [[], [FeatureRange(2**62 + 1, 0, 5), FeatureRange(3, 17, 1)]])
def test_a_pull_round_trip(ranges):
    pull = FeaturePull("hash", ranges)
    assert features.unpack_pull(pb.PullFeaturesRequest.FromString(features.pack_pull(pull).SerializeToString())) == pull


def test_an_answer_round_trip():
    pulled = PulledFeatures([RowStatus.OK, RowStatus.STALE, RowStatus.BAD], b"\1\2\3\4")
    assert features.unpack_pulled(pb.PullFeaturesResponse.FromString(features.pack_pulled(pulled).SerializeToString())) == pulled


def test_ranges_without_a_count_are_refused():
    message = features.pack_pull(FeaturePull("hash", [FeatureRange(1, 0, 5)]))
    message.num_positions = b""
    with pytest.raises(InvalidArgumentError, match="num_positions has 0 values, but generations has 1"):
        features.unpack_pull(message)
