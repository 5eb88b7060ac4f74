"""Features on their own stream, from a verifier to a drafter."""

from specwire.messages import FeaturePull, FeatureRange, PulledFeatures
from specwire.v1 import verifier_pb2 as pb
from specwire.wire import common
from specwire.wire.arrays import pack_int32, pack_int64, unpack_columns, unpack_int32, unpack_int64


def pack_pull(pull: FeaturePull) -> pb.PullFeaturesRequest:
    generations, firsts, counts = zip(*pull.ranges, strict=True) if pull.ranges else ((), (), ())
    return pb.PullFeaturesRequest(
        feature_set_hash=pull.feature_set_hash,
        generations=pack_int64(generations),
        first_positions=pack_int32(firsts),
        num_positions=pack_int32(counts),
    )


def unpack_pull(message: pb.PullFeaturesRequest) -> FeaturePull:
    rows = unpack_columns(
        ("generations", "first_positions", "num_positions"),
        [
            unpack_int64(message.generations, "generations"),
            unpack_int32(message.first_positions, "first_positions"),
            unpack_int32(message.num_positions, "num_positions"),
        ],
    )
    return FeaturePull(message.feature_set_hash, list(map(FeatureRange._make, rows)))


def pack_pulled(pulled: PulledFeatures) -> pb.PullFeaturesResponse:
    return pb.PullFeaturesResponse(statuses=bytes(pulled.statuses), features=pulled.data)


def unpack_pulled(message: pb.PullFeaturesResponse) -> PulledFeatures:
    return PulledFeatures(common.unpack_statuses(message.statuses), message.features)
