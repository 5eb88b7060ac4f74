"""The part of a status that says how many drafts there are, and why: configuration in effect, adaptive verification, calibration."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specwire.console import make_table
from specwire.messages import CalibrationStatus, CoordinatorStatus, LaneStatus

_NONE = "–"
_ALWAYS = ("num_speculative_tokens", "num_speculative_tokens_per_batch_size")


def speculation(status: CoordinatorStatus) -> list[RenderableType]:
    """Tables and lines; none before a verifier was reached."""
    parts: list[RenderableType] = []
    shown = [
        setting for setting in status.speculation if setting.value != setting.configured or setting.source != "default" or setting.key in _ALWAYS
    ]
    if shown:
        parts.append(Text(f"speculation: {', '.join(f'{setting.key} {setting.value}' for setting in shown)}"))
    reasons = dict.fromkeys([*status.clipped, *(reason for setting in shown for reason in setting.reasons)])
    parts += [Text(f"  {reason}", style="yellow") for reason in reasons]
    if any(lane.policy.is_adaptive for lane in status.lanes):
        parts.append(_policies(status.lanes))
    if status.calibration:
        parts.append(_calibration(status.calibration))
    return parts


def _policies(lanes: tuple[LaneStatus, ...]) -> Table:
    header = ("lane", "K", "drafts kept", "probes", "cost error", "verify, hop, ahead, lockstep x", "expected acceptance by position (from 0)")
    return make_table(header, [_policy_row(lane) for lane in lanes if lane.policy.is_adaptive], title="adaptive verification", num_left=2)


def _policy_row(lane: LaneStatus) -> tuple[str | Text, ...]:
    policy = lane.policy
    return (
        str(lane.index),
        Text(f"fixed: {policy.fallback}", style="yellow") if policy.fallback else "chosen",
        f"{policy.num_kept_tokens}/{policy.num_offered_tokens}",
        str(policy.num_probes),
        f"{100 * policy.cost_error:.0f}%" if policy.cost_error else _NONE,
        " ".join(
            f"{factor:.2f}" if factor else _NONE  # an older coordinator does not say all
            for factor in (policy.verify_factor, policy.hop_factor, policy.run_ahead_factor, policy.lockstep_factor)
        ),
        " ".join(f"{rate:.2f}" for rate in policy.forecast),
    )


def _calibration(kinds: tuple[CalibrationStatus, ...]) -> Table:
    rows = [
        (
            kind.method,
            "greedy" if kind.is_greedy else "random",
            str(sum(kind.num_observed_by_position)),
            f"{100 * kind.calibration_error:.1f}%",
            " ".join(f"{rate:.2f}" for rate in kind.acceptance_by_position),
        )
        for kind in kinds
    ]
    return make_table(
        ("drafts of", "sampling", "observed", "error", "accepted by position (from 0), if all before were"), rows, title="calibration", num_left=2
    )
