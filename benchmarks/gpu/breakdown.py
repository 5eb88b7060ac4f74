"""Where the time of a decode step goes, from the spans of one traced request and the times at which its client got the tokens."""

import asyncio
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specwire.cli.trace import FileSpan, read_spans
from specwire.tracing import format_traceparent

_FLUSH_TIMEOUT_S = 10.0
_PAUSE_S = 0.1
MAX_TRACED_STEPS = 1024
"""Step spans of a request; half of three quarters of them are the first ones without gaps."""


@dataclass(frozen=True, slots=True)
class TraceKey:
    """One traced request."""

    trace_id: int

    @classmethod
    def random(cls) -> "TraceKey":
        return cls(random.getrandbits(128) | 1)

    @property
    def traceparent(self) -> str:
        """Sent with the request, which is traced then, whatever the coordinator's ratio."""
        return format_traceparent(self.trace_id, 1)

    @property
    def hex(self) -> str:
        return f"{self.trace_id:032x}"


async def read_traces(path: Path, keys: Iterable[TraceKey], *, with_drafts: bool = False) -> dict[str, list[FileSpan]]:
    """The spans of each trace by its hex id, as soon as the verifier has written its own: services export about a second late.

    Args:
        with_drafts: also wait for the drafter's; those that do not come in time are left out.

    Raises:
        TimeoutError: some are still missing after ten seconds.
    """
    wanted = {key.hex for key in keys}
    deadline = time.monotonic() + _FLUSH_TIMEOUT_S
    while True:
        spans = [span for span in read_spans(path)[0] if span.trace_id in wanted]
        sent, run = ({span.trace_id for span in spans if span.name == name} for name in ("generate", "forward"))
        forwards = {span.parent_id for span in spans if span.name == "forward"}
        is_over = time.monotonic() > deadline
        drafted = {span.parent_id for span in spans if span.name == "draft"}
        has_drafts = not with_drafts or is_over or all(span.span_id in drafted for span in spans if span.name == "propose")
        if sent == run == wanted and has_drafts and all(span.span_id in forwards for span in spans if span.name == "verify"):
            return {trace_id: [span for span in spans if span.trace_id == trace_id] for trace_id in wanted}
        if is_over:
            raise TimeoutError(f"of {len(wanted)} traces {len(sent)} have ended, and the verifier wrote spans of {len(run)}")
        await asyncio.sleep(_PAUSE_S)


def break_down(spans: Sequence[FileSpan], arrivals: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Median milliseconds of the steps behind the first token.

    plan: until the round is sent, without the drafts. propose: waiting for drafts; draft: the drafter's part of that, hops and queues left out, with
    features: reading those of a head. hop: to the verifier and back. queue: waiting there for rounds
    before it. forward: from its launch to its results. commit: until the coordinator's loop takes the answer. stream: from there to the client,
    the commit itself included. With two rounds in flight the steps overlap; period is the time between two answers.

    Args:
        spans: of one trace.
        arrivals: (Unix ns, tokens of the request until then) at the client.
    """
    children: dict[str, dict[str, FileSpan]] = {}
    for span in spans:
        children.setdefault(span.parent_id, {})[span.name] = span
    steps = sorted((span for span in spans if span.name == "step"), key=lambda span: span.attributes["specwire.step"])
    parts: dict[str, list[float]] = {
        name: [] for name in ("plan", "propose", "draft", "features", "hop", "queue", "forward", "commit", "stream", "period")
    }
    num_tokens, answered_ns, expected_step = 0, 0, 1
    for step in steps:
        number, emitted = step.attributes["specwire.step"], step.attributes["specwire.num_tokens"]
        assert number == expected_step, f"step {expected_step} of the traced request has no span; raise the number of step spans"
        expected_step = number + 1
        if step.attributes.get("specwire.discarded"):
            continue
        num_tokens += emitted
        verify = children[step.span_id]["verify"]
        is_decode, before_ns, answered_ns = num_tokens > emitted > 0, answered_ns, verify.end_ns
        if not is_decode:
            continue
        forward, propose = children[verify.span_id]["forward"], children[step.span_id].get("propose")
        propose_ms = propose.duration_ms if propose is not None else 0.0
        wait_ms = float(forward.attributes["specwire.wait_ms"])
        parts["plan"].append((verify.start_ns - step.start_ns) / 1e6 - propose_ms)
        parts["propose"].append(propose_ms)
        if propose is not None:  # of the drafter's spans some may come too late
            for name in ("draft", "features"):
                found = children.get(propose.span_id, {}).get(name)
                parts[name] += [found.duration_ms] if found is not None else []
        parts["hop"].append(verify.duration_ms - wait_ms - forward.duration_ms)
        parts["queue"].append(wait_ms)
        parts["forward"].append(forward.duration_ms)
        parts["commit"].append((step.end_ns - verify.end_ns) / 1e6)
        arrived_ns = next(time_ns for time_ns, until in arrivals if until >= num_tokens)
        parts["stream"].append((arrived_ns - step.end_ns) / 1e6)
        parts["period"].append((answered_ns - before_ns) / 1e6)
    return {f"{name}_ms": round(statistics.median(values or [0.0]), 4) for name, values in parts.items()} | {"num_steps": len(parts["plan"])}
