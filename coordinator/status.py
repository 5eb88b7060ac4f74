"""The coordinator's state as one message, for clients that ask."""

import json
import statistics
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from specwire.messages import CalibrationStatus, CoordinatorStatus, DrafterStatus, LaneStatus, PolicyStatus, SettingStatus, StepStatus
from specwire.version import build_version

from .exposition import known_drafters, per_position
from .metrics import DrafterMetrics, LaneMetrics, Metrics, StepParts

if TYPE_CHECKING:
    from .drafters import Drafter
    from .engine import Engine
    from .lane import Lane
    from .link import DraftLink

_NS_PER_MS = 1e6


def describe_status(engine: "Engine") -> CoordinatorStatus:
    """As of now; inside the event loop."""
    metrics, counters, ready, description = engine.metrics, engine.counters, engine.ready, engine.description
    verified, accepted = per_position(counters, 0 if description is None else description.num_speculative_tokens)
    return CoordinatorStatus(
        version=build_version(),
        uptime_s=(time.monotonic_ns() - metrics.started_ns) / 1e9,
        is_ready=ready.is_ready,
        reason=ready.reason,
        model_id="" if description is None else description.model_id,
        max_model_len=0 if description is None else description.max_model_len,
        max_num_seqs=0 if description is None else description.max_num_seqs,
        max_num_batched_tokens=0 if description is None else description.max_num_batched_tokens,
        num_speculative_tokens=0 if description is None else description.num_speculative_tokens,
        max_queue=engine.max_queue,
        num_waiting=engine.num_waiting,
        num_requests=metrics.num_requests,
        num_requests_ended=metrics.request.count,
        num_prompt_tokens=int(metrics.prompt_tokens.sum),
        num_generated_tokens=metrics.num_generated_tokens,
        num_preemptions=counters.num_preemptions,
        num_pauses=counters.num_pauses,
        num_parked=engine.num_parked,
        num_drafts=verified[0] if verified else 0,
        num_draft_tokens=sum(verified),
        num_accepted_tokens=sum(accepted),
        clipped=() if description is None else description.reasons,
        drafts_per_position=tuple(verified),
        accepted_per_position=tuple(accepted),
        sequences_by_reason=dict(metrics.sequences_by_reason),
        fallbacks_by_cause=dict(counters.fallbacks),
        lanes=tuple(_lane(lane, metrics) for lane in engine.lanes),
        drafters=tuple(_drafter(drafter, links, metrics) for drafter, links in known_drafters(engine).items()),
        speculation=tuple(
            SettingStatus(setting.key, json.dumps(setting.value), json.dumps(setting.configured), setting.source, setting.reasons)
            for setting in engine.speculation
        ),
        calibration=tuple(
            CalibrationStatus(
                method=kind.method,
                is_greedy=kind.is_greedy,
                calibration_error=kind.calibration_error,
                calibration_error_by_position=kind.calibration_error_by_position,
                acceptance_by_position=kind.acceptance_by_position,
                num_observed_by_position=kind.num_observed_by_position,
            )
            for kind in engine.calibration_statistics
        ),
        variants=engine.variants.status(),
    )


def _lane(lane: "Lane", metrics: Metrics) -> LaneStatus:
    measured = metrics.lanes.get(lane.address) or LaneMetrics()
    return LaneStatus(
        index=lane.index,
        address=lane.address,
        is_ready=lane.is_ready,
        reason=lane.reason,
        is_draining=lane.is_draining,
        num_running=len(lane.running),
        num_speculative_tokens=measured.num_speculative_tokens,
        num_free_blocks=lane.num_free_blocks if lane.is_ready else 0,
        num_blocks=lane.num_blocks,
        num_steps=measured.step.count,
        times=_step_status(measured.recent),
        verify_cost=lane.verify_cost,
        policy=_policy(lane, measured),
    )


def _policy(lane: "Lane", measured: LaneMetrics) -> PolicyStatus:
    policy = lane.policy
    if policy is None:
        return PolicyStatus()
    return PolicyStatus(
        is_adaptive=True,
        fallback=policy.fallback,
        num_fixed_steps=measured.num_fixed,
        num_probes=measured.num_probes,
        num_offered_tokens=measured.num_offered,
        num_kept_tokens=int(measured.budget.sum),
        forecast=tuple(policy.policy.forecast.acceptance()),
        cost_error=policy.cost.clock.errors.median,
        verify_factor=policy.cost.verify.correction.factor,
        hop_factor=policy.cost.hops.correction.factor,
        run_ahead_factor=policy.cost.clock.run_ahead.factor,
        lockstep_factor=policy.cost.clock.lockstep.factor,
    )


def _step_status(recent: Iterable[StepParts]) -> StepStatus:
    steps = list(recent)
    if not steps:
        return StepStatus()
    columns = [sum(step) for step in steps], *zip(*steps, strict=True)
    return StepStatus(*(statistics.median(column) / _NS_PER_MS for column in columns))


def _drafter(drafter: "Drafter", links: "list[DraftLink]", metrics: Metrics) -> DrafterStatus:
    measured, description = metrics.drafters.get(drafter.address) or DrafterMetrics(), drafter.description
    return DrafterStatus(
        address=drafter.address,
        method="" if description is None else description.method,
        model_id="" if description is None else description.model_id,
        is_connected=any(link.is_connected for link in links),
        is_late=drafter.is_late,
        is_draining=any(link.is_draining for link in links),
        num_open=drafter.num_open,
        max_num_seqs=0 if drafter.max_num_seqs == sys.maxsize else drafter.max_num_seqs,
        reply_ms=statistics.median(measured.recent_ns) / _NS_PER_MS if measured.recent_ns else 0.0,
        num_replies=measured.reply.count,
        num_timeouts=measured.num_timeouts,
        num_draft_tokens=measured.num_draft_tokens,
        draft_cost=() if description is None else description.draft_cost,
        draft_ms_per_kv_token=0.0 if description is None else description.draft_ms_per_kv_token,
    )
