"""What is kept of a traced request while it runs, and the spans that are made of it. Nothing here holds a request or its tokens."""

from typing import TYPE_CHECKING

from specwire.messages import RowStatus, VerifyRow, VerifyRowResult
from specwire.tracing import Attributes, Span, SpanError, SpanEvent

if TYPE_CHECKING:
    from .plan import Plan, StepTimes

_MAX_LINKS = 32
_PREFILL_SHARE = 4
"""One part in so many of a choice's step spans is for prefill chunks."""
_GAP_SHARE = 4
_ROW_ERRORS = {
    RowStatus.STALE: SpanError("ABORTED", "the row did not run: an earlier one of its sequence had not"),
    RowStatus.OUT_OF_BLOCKS: SpanError("RESOURCE_EXHAUSTED", "the verifier had no KV blocks for the row"),
}


class StepSample:
    """Which steps get spans, at most `limit`: the first half of them one after the other, then with gaps that grow by a quarter each."""

    __slots__ = ("_next", "_num_dense", "_num_left", "_number")

    def __init__(self, limit: int) -> None:
        self._num_left = limit
        self._num_dense = (limit + 1) // 2
        self._number = 0
        self._next = 1

    def takes_next(self) -> bool:
        """Whether the next step, which this counts, gets a span."""
        self._number += 1
        if self._number < self._next or not self._num_left:
            return False
        self._num_left -= 1
        self._next = self._number + (1 if self._number < self._num_dense else max(1, self._number // _GAP_SHARE))
        return True


class RequestTrace:
    """A traced request.

    Args:
        parent_id: the client's span; 0 = this is the root.
        clock_ns: Unix time minus time.monotonic_ns(), the same for all spans of the trace so that they fit together.

    Attributes:
        traceparent_prefix: of the trace's spans; the span's id and the flags follow.
        error: what the first choice that failed ended with.
    """

    __slots__ = ("clock_ns", "error", "finish_reasons", "parent_id", "span_id", "trace_id", "traceparent_prefix")

    def __init__(self, trace_id: int, span_id: int, parent_id: int, clock_ns: int) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.clock_ns = clock_ns
        self.traceparent_prefix = f"00-{trace_id:032x}-"
        self.finish_reasons: list[str] = []
        self.error: SpanError | None = None

    def root(self, start_ns: int, end_ns: int, attributes: Attributes) -> list[Span]:
        """`generate`; times are time.monotonic_ns(), as everywhere here."""
        span = self.child("generate", self.span_id, self.parent_id, start_ns, end_ns, attributes, self.error)
        return [span._replace(is_parent_remote=self.parent_id > 0)]

    def child(
        self, name: str, span_id: int, parent_id: int, start_ns: int, end_ns: int, attributes: Attributes, error: SpanError | None = None
    ) -> Span:
        """A span of this trace."""
        return Span(name, self.trace_id, span_id, parent_id, False, start_ns + self.clock_ns, end_ns + self.clock_ns, attributes, error=error)

    def phase(self, name: str, span_id: int, start_ns: int, end_ns: int, attributes: Attributes, error: SpanError | None = None) -> list[Span]:
        """`queue` or `prefill`."""
        return [self.child(name, span_id, self.span_id, start_ns, end_ns, attributes, error)]


class Prefill:
    """A prefill that is under way."""

    __slots__ = ("lane", "num_tokens", "start_ns")

    def __init__(self, start_ns: int, lane: int, num_tokens: int) -> None:
        self.start_ns = start_ns
        self.lane = lane
        self.num_tokens = num_tokens


class SequenceTrace:
    """A choice of a traced request.

    Attributes:
        is_queued, prefill, steps: what is open.
        num_steps: steps with a row of it so far; the numbers of its steps.
        asked_step: what the step that drafters were asked in has (None: it gets no span), until that step's round is sent.
        has_asked: drafters were asked for it, and the step's round is not sent yet.
    """

    __slots__ = ("_decodes", "_prefills", "asked_step", "choice", "has_asked", "is_queued", "num_steps", "prefill", "request", "steps")

    def __init__(self, request: RequestTrace, choice: int, max_steps: int) -> None:
        self.request = request
        self.choice = choice
        self.is_queued = True
        self.prefill: Prefill | None = None
        self.steps: list[StepTrace] = []
        self.num_steps = 0
        self.asked_step: StepTrace | None = None
        self.has_asked = False
        self._prefills = StepSample(max_steps // _PREFILL_SHARE)
        self._decodes = StepSample(max_steps - max_steps // _PREFILL_SHARE)

    def takes_next_step(self, *, is_prefill: bool) -> bool:
        """Counts a step; whether it gets a span."""
        self.num_steps += 1
        return (self._prefills if is_prefill else self._decodes).takes_next()


class StepTrace:
    """One step of one choice: `step` with `propose` and `verify`. Built up as the step goes on.

    Attributes:
        times: of the plan; None while drafts are waited for.
        propose_id: 0 = no drafter was asked. verify_id: 0 = no round was made.
        batch: traced requests with a row in the same round.
        index: of its row in the round.
    """

    __slots__ = (
        "asked_ns", "batch", "cause", "choice", "drafter", "end_ns", "error", "index", "is_closed", "is_discarded", "k", "lane", "num_accepted",
        "num_asked", "num_drafts", "num_rows", "num_tokens", "number", "propose_id", "request", "round", "span_id", "status", "times", "trace",
        "verifier", "verify_id",
    )  # fmt: skip

    def __init__(self, trace: SequenceTrace, span_id: int, lane: int) -> None:
        self.trace = trace
        self.request = trace.request
        self.choice = trace.choice
        self.number = trace.num_steps
        self.span_id = span_id
        self.lane = lane
        self.times: StepTimes | None = None
        self.propose_id = self.verify_id = 0
        self.asked_ns = self.end_ns = 0
        self.drafter = self.verifier = self.cause = ""
        self.num_asked = self.num_drafts = self.num_accepted = self.num_tokens = self.num_rows = self.k = self.index = self.round = 0
        self.batch: list[RequestTrace] = []
        self.status: RowStatus | None = None
        self.error: SpanError | None = None
        self.is_closed = self.is_discarded = False
        trace.steps.append(self)

    @property
    def num_spans(self) -> int:
        return 1 + (self.propose_id > 0) + self.was_sent

    @property
    def was_sent(self) -> bool:
        """Whether its round has left: a fault may come between."""
        return self.times is not None and self.times.sent_ns > 0

    def asked(self, propose_id: int, drafter: str, num_asked: int, now_ns: int) -> None:
        """A drafter is asked."""
        self.propose_id = propose_id
        self.drafter = drafter
        self.num_asked = num_asked
        self.asked_ns = now_ns

    def sent(self, verify_id: int, verifier: str, round_: int, index: int, row: VerifyRow, num_rows: int, plan: "Plan") -> None:
        """Its row goes out in a round."""
        self.verify_id = verify_id
        self.verifier = verifier
        self.round = round_
        self.index = index
        self.num_drafts = len(row.draft_tokens)
        self.num_rows = num_rows
        self.k = plan.num_speculative_tokens
        self.times = plan.times

    def answered(self, answer: VerifyRowResult, now_ns: int) -> None:
        """Its row has an answer: the step is over."""
        self.status = answer.status
        self.num_accepted = answer.num_accepted
        self.num_tokens = len(answer.token_ids)
        if answer.status is not RowStatus.OK:
            self.error = _ROW_ERRORS.get(answer.status) or SpanError("INTERNAL", answer.error)
        self.close(now_ns)

    def discard(self, error: SpanError | None, now_ns: int) -> None:
        """The sequence has ended, or has lost its place, before the step was over."""
        self.is_discarded = True
        self.error = error
        self.close(now_ns)

    def close(self, now_ns: int) -> None:
        assert not self.is_closed, f"step {self.number} of choice {self.choice} ends twice"
        self.is_closed = True
        self.end_ns = now_ns

    def spans(self) -> list[Span]:
        """Of a closed step; on the tracer's thread."""
        request, times, choice = self.request, self.times, self.choice
        spans = []
        if self.propose_id:
            spans.append(self._propose())
        if self.was_sent:
            spans.append(self._verify())
        attributes = {"specwire.choice": choice, "specwire.lane": self.lane, "specwire.step": self.number}
        if self.times is not None:
            attributes |= {
                "specwire.num_rows": self.num_rows, "specwire.num_speculative_tokens": self.k, "specwire.num_tokens": self.num_tokens
            }  # fmt: skip
        if self.is_discarded:
            attributes["specwire.discarded"] = True
        start_ns = self.asked_ns if times is None else times.planned_ns
        span = request.child("step", self.span_id, request.span_id, start_ns, self.end_ns, attributes, self.error)
        others = [(other.trace_id, other.span_id) for other in self.batch if other is not request]
        spans.append(span._replace(links=others[:_MAX_LINKS]))
        return spans

    def _propose(self) -> Span:
        attributes: dict[str, str | int] = {
            "specwire.choice": self.choice, "specwire.drafter": self.drafter, "specwire.num_asked_tokens": self.num_asked
        }  # fmt: skip
        if self.times is None or not self.times.drafted_ns:
            # The step ended while it was waiting.
            return self.request.child("propose", self.propose_id, self.span_id, self.asked_ns, self.end_ns, attributes, self.error)
        end_ns = self.times.drafted_ns
        attributes["specwire.num_draft_tokens"] = self.num_drafts
        span = self.request.child("propose", self.propose_id, self.span_id, self.times.asked_ns, end_ns, attributes)
        if not self.cause:
            return span
        return span._replace(events=[SpanEvent("fallback", end_ns + self.request.clock_ns, {"specwire.cause": self.cause})])

    def _verify(self) -> Span:
        assert self.times is not None, "a row that was sent has times"
        attributes: dict[str, str | int] = {
            "specwire.choice": self.choice, "specwire.round": self.round, "specwire.verifier": self.verifier,
            "specwire.num_draft_tokens": self.num_drafts,
        }  # fmt: skip
        end_ns = self.end_ns
        if self.status is not None:
            end_ns = self.times.answered_ns
            attributes |= {"specwire.num_accepted_tokens": self.num_accepted, "specwire.row_status": self.status.name}
        return self.request.child("verify", self.verify_id, self.span_id, self.times.sent_ns, end_ns, attributes, self.error)
