"""A coordinator's status. Fields have the same names on both sides."""

import dataclasses
from typing import Any

from specwire.messages import CoordinatorStatus, DrafterStatus, LaneStatus, StepStatus
from specwire.v1 import coordinator_pb2 as pb

_NESTED = ("times", "lanes", "drafters")
_TUPLES = ("clipped", "drafts_per_position", "accepted_per_position")
_COUNTS = ("sequences_by_reason", "fallbacks_by_cause")


def pack_status(status: CoordinatorStatus) -> pb.GetStatusResponse:
    lanes = [pb.LaneStatus(**_plain(lane), times=pb.StepStatus(**_plain(lane.times))) for lane in status.lanes]
    drafters = [pb.DrafterStatus(**_plain(drafter)) for drafter in status.drafters]
    return pb.GetStatusResponse(status=pb.CoordinatorStatus(**_plain(status), lanes=lanes, drafters=drafters))


def unpack_status(response: pb.GetStatusResponse) -> CoordinatorStatus:
    message = response.status
    values = _values(CoordinatorStatus, message)
    return CoordinatorStatus(
        **values | {name: tuple(values[name]) for name in _TUPLES} | {name: dict(values[name]) for name in _COUNTS},
        lanes=tuple(LaneStatus(**_values(LaneStatus, lane), times=StepStatus(**_values(StepStatus, lane.times))) for lane in message.lanes),
        drafters=tuple(DrafterStatus(**_values(DrafterStatus, drafter)) for drafter in message.drafters),
    )


def _plain(message: Any) -> dict[str, Any]:
    """The fields of a dataclass that are no messages themselves."""
    return _values(type(message), message)


def _values(kind: Any, message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(kind) if field.name not in _NESTED}
