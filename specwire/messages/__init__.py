"""The messages that services exchange, as plain Python: protobuf stops at specwire.wire.

Rows are named tuples, since a step makes hundreds of them; everything else is a frozen slots dataclass.
"""

from specwire.messages.common import (
    ConditionalOutcome,
    FeatureHandle,
    FinishReason,
    Hello,
    LogitOverlay,
    Proposals,
    RoundTiming,
    RowStatus,
    SlotRef,
    TokenOrigin,
    Welcome,
)
from specwire.messages.describe import DraftCost, FeatureSet, ServiceDescription, TokenizerSpec, VerifyCost
from specwire.messages.draft import DraftCommit, DraftOpen, DraftResult, DraftRound, DraftRow, DraftRowResult
from specwire.messages.features import FeaturePull, FeatureRange, PulledFeatures
from specwire.messages.generate import (
    ChoiceDelta,
    DraftReport,
    ErrorStatus,
    GenerateRequest,
    SessionEvent,
    SessionStart,
    SessionUpdate,
    SpecStats,
    StreamDelta,
    Usage,
)
from specwire.messages.status import CalibrationStatus, CoordinatorStatus, DrafterStatus, LaneStatus, PolicyStatus, SettingStatus, StepStatus
from specwire.messages.verify import TokenLogprobs, VerifyOpen, VerifyResult, VerifyRound, VerifyRow, VerifyRowResult

__all__ = [
    "CalibrationStatus",
    "ChoiceDelta",
    "ConditionalOutcome",
    "CoordinatorStatus",
    "DraftCommit",
    "DraftCost",
    "DraftOpen",
    "DraftReport",
    "DraftResult",
    "DraftRound",
    "DraftRow",
    "DraftRowResult",
    "DrafterStatus",
    "ErrorStatus",
    "FeatureHandle",
    "FeaturePull",
    "FeatureRange",
    "FeatureSet",
    "FinishReason",
    "GenerateRequest",
    "Hello",
    "LaneStatus",
    "LogitOverlay",
    "PolicyStatus",
    "Proposals",
    "PulledFeatures",
    "RoundTiming",
    "RowStatus",
    "ServiceDescription",
    "SessionEvent",
    "SessionStart",
    "SessionUpdate",
    "SettingStatus",
    "SlotRef",
    "SpecStats",
    "StepStatus",
    "StreamDelta",
    "TokenLogprobs",
    "TokenOrigin",
    "TokenizerSpec",
    "Usage",
    "VerifyCost",
    "VerifyOpen",
    "VerifyResult",
    "VerifyRound",
    "VerifyRow",
    "VerifyRowResult",
    "Welcome",
]
