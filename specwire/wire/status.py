"""A coordinator's status. Fields have the same names on both sides."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from specwire.errors import InvalidArgumentError
from specwire.messages import (
    CalibrationStatus,
    CanaryAction,
    CoordinatorStatus,
    DrafterStatus,
    LaneStatus,
    PolicyStatus,
    SettingStatus,
    StepStatus,
    VariantStatus,
)
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire.describe import pack_draft_cost, pack_verify_cost, unpack_draft_cost, unpack_verify_cost

_NESTED = ("times", "policy", "lanes", "drafters", "speculation", "calibration", "variants", "verify_cost", "draft_cost", "draft_ms_per_kv_token")
_TUPLES = ("clipped", "drafts_per_position", "accepted_per_position")
_CALIBRATION_TUPLES = ("calibration_error_by_position", "acceptance_by_position", "num_observed_by_position")
_COUNTS = ("sequences_by_reason", "fallbacks_by_cause")


def pack_status(status: CoordinatorStatus) -> pb.GetStatusResponse:
    lanes = [
        pb.LaneStatus(
            **_plain(lane),
            times=pb.StepStatus(**_plain(lane.times)),
            policy=pb.PolicyStatus(**_plain(lane.policy)),
            verify_cost=pack_verify_cost(lane.verify_cost),
        )
        for lane in status.lanes
    ]
    drafters = [
        pb.DrafterStatus(**_plain(drafter), draft_cost=pack_draft_cost(drafter.draft_cost, drafter.draft_ms_per_kv_token))
        for drafter in status.drafters
    ]
    speculation = [pb.SettingStatus(**_plain(setting)) for setting in status.speculation]
    calibration = [pb.CalibrationStatus(**_plain(kind)) for kind in status.calibration]
    return pb.GetStatusResponse(
        status=pb.CoordinatorStatus(
            **_plain(status),
            lanes=lanes,
            drafters=drafters,
            speculation=speculation,
            calibration=calibration,
            variants=_pack_variants(status.variants),
        )
    )


def unpack_status(response: pb.GetStatusResponse) -> CoordinatorStatus:
    message = response.status
    values = _values(CoordinatorStatus, message, _TUPLES)
    return CoordinatorStatus(
        **values | {name: dict(values[name]) for name in _COUNTS},
        lanes=tuple(map(_unpack_lane, message.lanes)),
        drafters=tuple(map(_unpack_drafter, message.drafters)),
        speculation=tuple(SettingStatus(**_values(SettingStatus, setting, ("reasons",))) for setting in message.speculation),
        calibration=tuple(CalibrationStatus(**_values(CalibrationStatus, kind, _CALIBRATION_TUPLES)) for kind in message.calibration),
        variants=_unpack_variants(message.variants),
    )


def pack_canary(action: CanaryAction, share: float, config: str) -> pb.SetCanaryRequest:
    return pb.SetCanaryRequest(action=action.value, share=share, config=config)  # type: ignore[arg-type]  # the enum's numbers are its values


def unpack_canary(request: pb.SetCanaryRequest) -> tuple[CanaryAction, float, str]:
    """Action, share and configuration. Raises InvalidArgumentError for an action that is not known."""
    try:
        return CanaryAction(request.action), request.share, request.config
    except ValueError:
        raise InvalidArgumentError(f"action is {request.action}, but must be one of CanaryAction; update what sends it, or the coordinator") from None


def pack_canary_answer(variants: Sequence[VariantStatus]) -> pb.SetCanaryResponse:
    return pb.SetCanaryResponse(variants=_pack_variants(variants))


def unpack_canary_answer(response: pb.SetCanaryResponse) -> tuple[VariantStatus, ...]:
    return _unpack_variants(response.variants)


def _pack_variants(variants: Sequence[VariantStatus]) -> list[pb.VariantStatus]:
    return [pb.VariantStatus(**_plain(variant)) for variant in variants]


def _unpack_variants(variants: Iterable[pb.VariantStatus]) -> tuple[VariantStatus, ...]:
    return tuple(VariantStatus(**_values(VariantStatus, variant)) for variant in variants)


def _unpack_lane(lane: pb.LaneStatus) -> LaneStatus:
    times = StepStatus(**_values(StepStatus, lane.times))
    policy = PolicyStatus(**_values(PolicyStatus, lane.policy, ("forecast",)))
    return LaneStatus(**_values(LaneStatus, lane), times=times, policy=policy, verify_cost=unpack_verify_cost(lane.verify_cost))


def _unpack_drafter(drafter: pb.DrafterStatus) -> DrafterStatus:
    cost = drafter.draft_cost
    return DrafterStatus(**_values(DrafterStatus, drafter), draft_cost=unpack_draft_cost(cost), draft_ms_per_kv_token=cost.ms_per_kv_token)


def _plain(message: Any) -> dict[str, Any]:
    """The fields of a dataclass that are no messages themselves."""
    return _values(type(message), message)


def _values(kind: Any, message: Any, tuples: Sequence[str] = ()) -> dict[str, Any]:
    values = {field.name: getattr(message, field.name) for field in dataclasses.fields(kind) if field.name not in _NESTED}
    return values | {name: tuple(values[name]) for name in tuples}
