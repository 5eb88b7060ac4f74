"""How a coordinator's status looks in a terminal. Rates are differences between two looks, over the coordinator's own clock."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specwire.cli.report import name_drafts
from specwire.cli.status_speculation import speculation
from specwire.console import make_table
from specwire.messages import CoordinatorStatus, DrafterStatus, LaneStatus

_NONE = "–"


def render(status: CoordinatorStatus, before: CoordinatorStatus | None) -> RenderableType:
    """Everything that is known, as tables.

    Args:
        status: now.
        before: an earlier one of the same coordinator, for rates; None where there is none.
    """
    if before is not None and before.uptime_s >= status.uptime_s:
        before = None  # another process: its counts began anew
    parts: list[RenderableType] = [_headline(status), _totals(status, before), _lanes(status)]
    if status.drafters:
        parts += [_drafters(status, before), _acceptance(status, before)]
    parts += speculation(status)
    if status.fallbacks_by_cause:
        parts.append(Text(f"without drafts: {_counts(status.fallbacks_by_cause)}", style="yellow"))
    return Group(*parts)


def rate(change: int, elapsed_s: float) -> str:
    """Per second."""
    return f"{change / elapsed_s:.1f}/s" if elapsed_s > 0 else _NONE


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else _NONE


def short_address(address: str) -> str:
    """Of a socket in a long folder only the file: it is that which tells services of one stack apart."""
    folder, slash, name = address.rpartition("/")
    return f"unix:…/{name}" if slash and address.startswith("unix:") and len(folder) > 10 else address


def _headline(status: CoordinatorStatus) -> Text:
    state = Text("serving" if status.is_ready else "not serving", style="green" if status.is_ready else "red")
    text = Text.assemble(state, f"  {status.model_id or 'no model yet'}  specwire {status.version}  up {_duration(status.uptime_s)}")
    return text.append(f"\n{status.reason}", style="yellow") if status.reason else text


def _totals(status: CoordinatorStatus, before: CoordinatorStatus | None) -> Text:
    tokens = requests = _NONE
    if before is not None:
        elapsed_s = status.uptime_s - before.uptime_s
        tokens = rate(status.num_generated_tokens - before.num_generated_tokens, elapsed_s)
        requests = rate(status.num_requests_ended - before.num_requests_ended, elapsed_s)
    num_running = sum(lane.num_running for lane in status.lanes)
    lines = [
        f"sequences: {num_running} running, {status.num_waiting} of at most {status.max_queue} waiting{_parked(status)}; "
        f"requests: {status.num_requests} in, {status.num_requests_ended} ended ({requests})",
        f"tokens: {status.num_prompt_tokens} prompt, {status.num_generated_tokens} generated ({tokens}); preemptions: {status.num_preemptions}; "
        f"sequences ended: {_counts(status.sequences_by_reason)}",
    ]
    return Text("\n".join(lines))


def _parked(status: CoordinatorStatus) -> str:
    return f", {status.num_parked} parked until their clients read" if status.num_parked else ""


def _lanes(status: CoordinatorStatus) -> Table:
    header = ("lane", "verifier", "state", "running", "K", "KV blocks used", "step", "plan", "propose", "hop", "queue", "forward", "commit")
    rows = [_lane_row(lane, status) for lane in status.lanes]
    return make_table(header, rows, title="lanes (milliseconds of a step: median of the last ones)", num_left=3)


def _lane_row(lane: LaneStatus, status: CoordinatorStatus) -> Sequence[str | Text]:
    num_used, times = lane.num_blocks - lane.num_free_blocks, lane.times
    numbers = (
        times.step_ms, times.plan_ms, times.propose_ms, times.verify_hop_ms, times.verify_queue_ms, times.forward_ms, times.commit_ms,
    )  # fmt: skip
    return (
        str(lane.index),
        short_address(lane.address),
        _state("draining" if lane.is_draining else "ready" if lane.is_ready else "not ready"),
        f"{lane.num_running}/{status.max_num_seqs}",
        f"{lane.num_speculative_tokens}/{status.num_speculative_tokens}" if lane.num_steps else _NONE,
        f"{num_used}/{lane.num_blocks} ({share(num_used, lane.num_blocks)})" if lane.is_ready else _NONE,
        *(_ms(number) if lane.num_steps else _NONE for number in numbers),
    )


def _drafters(status: CoordinatorStatus, before: CoordinatorStatus | None) -> Table:
    header = ("drafter", "method", "state", "sequences", "reply", "rounds", "late", "draft tokens", "per second")
    earlier = {} if before is None else {drafter.address: drafter for drafter in before.drafters}
    elapsed_s = status.uptime_s - before.uptime_s if before is not None else 0.0
    rows = [_drafter_row(drafter, earlier.get(drafter.address), elapsed_s) for drafter in status.drafters]
    return make_table(header, rows, title="drafters (milliseconds of a reply: median of the last ones)", num_left=3)


def _drafter_row(drafter: DrafterStatus, before: DrafterStatus | None, elapsed_s: float) -> Sequence[str | Text]:
    return (
        short_address(drafter.address),
        name_drafts(drafter.method, drafter.model_id) or _NONE,
        _state("not connected" if not drafter.is_connected else "draining" if drafter.is_draining else "late" if drafter.is_late else "ready"),
        f"{drafter.num_open}/{drafter.max_num_seqs}" if drafter.max_num_seqs else str(drafter.num_open),
        _ms(drafter.reply_ms) if drafter.num_replies else _NONE,
        str(drafter.num_replies),
        str(drafter.num_timeouts),
        str(drafter.num_draft_tokens),
        _NONE if before is None else rate(drafter.num_draft_tokens - before.num_draft_tokens, elapsed_s),
    )


def _acceptance(status: CoordinatorStatus, before: CoordinatorStatus | None) -> Table:
    """Of the drafts that had a token at a position, the share whose token there was accepted."""
    drafts, accepted = status.drafts_per_position, status.accepted_per_position
    header = ("accepted at position (from 0)", *map(str, range(len(drafts))), "all")
    rows = [("since the start", *map(share, accepted, drafts), share(sum(accepted), sum(drafts)))]
    if before is not None:
        new_drafts, new_accepted = _since(drafts, before.drafts_per_position), _since(accepted, before.accepted_per_position)
        rows.append(("since the last look", *map(share, new_accepted, new_drafts), share(sum(new_accepted), sum(new_drafts))))
    return make_table(header, rows, num_left=3)


def _since(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [count - (before[index] if index < len(before) else 0) for index, count in enumerate(now)]


def _state(state: str) -> Text:
    return Text(state, style={"ready": "green", "not ready": "red", "not connected": "red"}.get(state, "yellow"))


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.0f} s"
