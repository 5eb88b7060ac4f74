"""Spans of traced requests. The step and the ends of requests tell it what happens; it keeps small records, and hands them on when they are
complete. No span is built here, and nothing is done for requests that are not traced beyond a look at the step's rows."""

import functools
import time
import uuid
from typing import TYPE_CHECKING

from specwire.config import CoordinatorConfig
from specwire.errors import SpecwireError
from specwire.messages import VerifyResult, VerifyRow
from specwire.tracing import Attributes, SpanError, Tracer, error_of, is_sampled, open_tracer, parse_traceparent

from .counters import Counters
from .trace_records import Prefill, RequestTrace, SequenceTrace, StepTrace

if TYPE_CHECKING:
    from .lane import Lane
    from .link import DraftLink
    from .plan import Plan
    from .sequence import Request, Sequence
    from .slots import Round, Slot

_FEW = 8
_LOST_PLACE = SpanError("ABORTED", "the sequence lost its place, and waits for another one")


class Spans:
    """Follows traced requests. Times are time.monotonic_ns(); everything runs in the event loop.

    Args:
        tracer: takes what is complete.
        config: which requests, how many steps of each, and whether with their token ids.
        counters: of the coordinator.
    """

    def __init__(self, tracer: Tracer, config: CoordinatorConfig, counters: Counters) -> None:
        self.tracer = tracer
        self._placed: dict[Lane, dict[Sequence, SequenceTrace]] = {}
        self._sample_ratio = config.trace_sample_ratio
        self._max_steps = config.trace_max_steps
        self._has_content = config.trace_content
        self._counters = counters

    # --- requests ---

    def admitted(self, request: "Request") -> None:
        """Decides whether a request is traced: as its client does, if that sends a traceparent, else by the ratio."""
        text, tracer = request.message.traceparent, self.tracer
        parent = parse_traceparent(text) if text else None
        if parent is None:
            self._counters.num_bad_traceparents += bool(text)
            trace_id, parent_id = tracer.new_trace_id(), 0
            is_traced = is_sampled(trace_id, self._sample_ratio)
        else:
            trace_id, parent_id, is_traced = parent
        if is_traced:
            trace = request.trace = RequestTrace(trace_id, tracer.new_span_id(), parent_id, time.time_ns() - time.monotonic_ns())
            num_choices, most = len(request.sequences), self._max_steps
            for index, sequence in enumerate(request.sequences):
                max_steps = most * (index + 1) // num_choices - most * index // num_choices
                sequence.trace = SequenceTrace(trace, sequence.choice, max_steps)

    def sequence_ended(self, sequence: "Sequence", reason: str, error: SpecwireError | None) -> None:
        trace = sequence.trace
        if trace is not None:
            request = trace.request
            request.finish_reasons.append(reason)
            span_error = None if error is None else error_of(error)
            request.error = request.error or span_error
            self._close(sequence, trace, span_error)

    def request_ended(self, request: "Request") -> None:
        trace = request.trace
        if trace is not None:
            attributes = _request_attributes(request, trace, with_content=self._has_content)
            self.tracer.record(1, functools.partial(trace.root, request.arrived_ns, time.monotonic_ns(), attributes))

    # --- places ---

    def placed(self, sequence: "Sequence") -> None:
        trace = sequence.trace
        if trace is not None:
            assert sequence.slot is not None, "a placed sequence has a slot"
            assert trace.is_queued, "a sequence that is placed has waited"
            lane = sequence.slot.lane
            self._placed.setdefault(lane, {})[sequence] = trace
            self._phase(trace, "queue", sequence.queued_ns, sequence.placed_ns)
            trace.is_queued = False
            trace.prefill = Prefill(sequence.placed_ns, lane.index, len(sequence.token_ids))

    def prefilled(self, sequence: "Sequence", now_ns: int) -> None:
        trace = sequence.trace
        if trace is not None:
            self._end_prefill(trace, now_ns)

    def requeued(self, sequence: "Sequence", setback: SpecwireError | None) -> None:
        trace = sequence.trace
        if trace is not None:
            self._close(sequence, trace, _LOST_PLACE if setback is None else error_of(setback))
            trace.is_queued = True

    # --- steps ---

    def asking(self, link: "DraftLink", round_: int) -> tuple[str, ...]:
        """Contexts of the `propose` spans of a round to a drafter, which is about to be sent."""
        placed = self._placed.get(link.lane)
        if not placed:
            return ()
        traceparents = []
        now_ns = time.monotonic_ns()
        for sequence, trace in placed.items():
            place = sequence.draft_slot
            if place is not None and place.link is link and place.parent_round == round_:
                step = trace.asked_step = self._next_step(trace, link.lane, is_prefill=False)
                trace.has_asked = True
                if step is not None:
                    step.asked(self.tracer.new_span_id(), link.drafter.address, place.num_asked, now_ns)
                    traceparents.append(f"{trace.request.traceparent_prefix}{step.propose_id:016x}-01")
        return tuple(traceparents)

    def launching(self, lane: "Lane", slots: list["Slot"], rows: list[VerifyRow], plan: "Plan") -> tuple[str, ...]:
        """Contexts of the `verify` spans of a round to the lane's verifier, which is about to be sent."""
        placed = self._placed.get(lane)
        if not placed:
            return ()
        # A search for each of a few is cheaper than a look at all.
        index_of = slots.index if len(placed) <= _FEW else {slot: index for index, slot in enumerate(slots)}.__getitem__
        steps: list[StepTrace] = []
        batch: dict[RequestTrace, None] = {}
        traceparents = []
        for sequence, trace in placed.items():
            slot = sequence.slot
            if slot is None or slot.is_closed or slot.parent_round != lane.next_round:
                continue
            batch[trace.request] = None
            index = index_of(slot)
            row = rows[index]
            step = trace.asked_step if trace.has_asked else self._next_step(trace, lane, is_prefill=row.token_budget > 0)
            trace.asked_step, trace.has_asked = None, False
            if step is not None:
                step.sent(self.tracer.new_span_id(), lane.address, lane.next_round, index, row, len(rows), plan)
                if step.propose_id and not row.draft_tokens:
                    step.cause = _fallback_cause(lane, step.drafter)
                steps.append(step)
                traceparents.append(f"{trace.request.traceparent_prefix}{step.verify_id:016x}-01")
        if steps:
            plan.times.traces = steps
            together = list(batch)
            for step in steps:
                step.batch = together
        return tuple(traceparents)

    def answered(self, round_: "Round", result: VerifyResult) -> None:
        """A round's answer is there, and about to be committed."""
        steps = round_.plan.times.traces
        if not steps:
            return
        now_ns = time.monotonic_ns()
        for step in steps:
            if not step.is_closed:
                step.answered(result.rows[step.index], now_ns)
                step.trace.steps.remove(step)
                self.tracer.record(step.num_spans, step.spans)

    # --- what is open ---

    def _next_step(self, trace: SequenceTrace, lane: "Lane", *, is_prefill: bool) -> StepTrace | None:
        if not trace.takes_next_step(is_prefill=is_prefill):
            return None
        return StepTrace(trace, self.tracer.new_span_id(), lane.index)

    def _close(self, sequence: "Sequence", trace: SequenceTrace, error: SpanError | None) -> None:
        """Ends whatever is open: the sequence has ended, or has lost its place."""
        now_ns = time.monotonic_ns()
        if trace.is_queued:
            trace.is_queued = False
            self._phase(trace, "queue", sequence.queued_ns, now_ns, error=error)
        else:
            assert sequence.slot is not None, "a sequence that does not wait has, or had, a slot"
            self._leave(sequence.slot.lane, sequence)
        self._end_prefill(trace, now_ns, error)
        for step in trace.steps:
            step.discard(error, now_ns)
            self.tracer.record(step.num_spans, step.spans)
        trace.steps.clear()
        trace.asked_step, trace.has_asked = None, False

    def _leave(self, lane: "Lane", sequence: "Sequence") -> None:
        placed = self._placed[lane]
        del placed[sequence]
        if not placed:
            del self._placed[lane]

    def _end_prefill(self, trace: SequenceTrace, now_ns: int, error: SpanError | None = None) -> None:
        prefill, trace.prefill = trace.prefill, None
        if prefill is not None:
            attributes = {"specwire.lane": prefill.lane, "specwire.num_tokens": prefill.num_tokens}
            self._phase(trace, "prefill", prefill.start_ns, now_ns, attributes, error)

    def _phase(
        self, trace: SequenceTrace, name: str, start_ns: int, end_ns: int, attributes: Attributes | None = None, error: SpanError | None = None
    ) -> None:
        all_attributes = {"specwire.choice": trace.choice, **(attributes or {})}
        span_id = self.tracer.new_span_id()
        self.tracer.record(1, functools.partial(trace.request.phase, name, span_id, start_ns, end_ns, all_attributes, error))


def open_spans(config: CoordinatorConfig, counters: Counters) -> Spans | None:
    """None where nothing takes spans. Raises InvalidArgumentError if the trace file can't be written."""
    tracer = open_tracer("coordinator", uuid.uuid4().hex, endpoint=config.trace_endpoint, file=config.trace_file)
    return None if tracer is None else Spans(tracer, config, counters)


def _fallback_cause(lane: "Lane", drafter: str) -> str:
    """Why a drafter that was asked is not waited for any more; "" where it has simply nothing to propose."""
    link = next((link for link in lane.links if link.drafter.address == drafter), None)
    if link is None or not link.is_connected:
        return "drafter_lost"
    return "drafter_timeout" if link.is_late else ""


def _request_attributes(request: "Request", trace: RequestTrace, *, with_content: bool) -> Attributes:
    sequences = request.sequences
    usages, stats = [sequence.usage() for sequence in sequences], [sequence.spec_stats() for sequence in sequences]
    attributes: dict[str, str | int | float | list[str] | list[int]] = {
        "specwire.request_id": request.message.request_id,
        "specwire.num_choices": len(sequences),
        "specwire.num_prompt_tokens": usages[0].num_prompt_tokens,
        "specwire.num_generated_tokens": sum(usage.num_generated_tokens for usage in usages),
        "specwire.num_cached_tokens": sum(usage.num_cached_tokens for usage in usages),
        "specwire.num_steps": sum(stat.num_steps for stat in stats),
        "specwire.num_draft_tokens": sum(stat.num_draft_tokens for stat in stats),
        "specwire.num_accepted_tokens": sum(stat.num_accepted_tokens for stat in stats),
        "specwire.num_preemptions": sum(stat.num_preemptions for stat in stats),
        "specwire.finish_reasons": trace.finish_reasons,
    }
    first_token_ns = min((sequence.first_token_ns for sequence in sequences if sequence.first_token_ns), default=0)
    if first_token_ns:
        attributes["specwire.time_to_first_token_ms"] = (first_token_ns - request.arrived_ns) / 1e6
    if with_content:
        attributes["specwire.prompt_token_ids"] = list(request.message.prompt_token_ids)
        attributes["specwire.generated_token_ids"] = [token for s in sequences for token in s.token_ids[s.num_prompt_tokens :]]
    return attributes
