"""What metrics and spans are made of: the step and the ends of requests tell it here, inside the event loop, so everything must be cheap."""

from typing import TYPE_CHECKING

from specwire.errors import SpecwireError
from specwire.messages import DraftResult, VerifyResult, VerifyRow

from .metrics import Metrics

if TYPE_CHECKING:
    from .lane import Lane
    from .link import DraftLink
    from .plan import Plan
    from .sequence import Request, Sequence
    from .slots import Round, Slot
    from .spans import Spans


class Telemetry:
    """Hands on what happens. Times are time.monotonic_ns().

    Args:
        spans: follows traced requests; None where nothing takes spans.
    """

    def __init__(self, spans: "Spans | None" = None) -> None:
        self.metrics = Metrics(None if spans is None else spans.tracer)
        self.spans = spans

    def close(self) -> None:
        """Sends what waits to be sent, for about a second at most; blocks."""
        if self.spans is not None:
            self.spans.tracer.close()

    def admitted(self, request: "Request") -> None:
        """A request has come, at request.arrived_ns; its sequences wait from now on."""
        self.metrics.admitted(request)
        if self.spans is not None:
            self.spans.admitted(request)

    def placed(self, sequence: "Sequence") -> None:
        """A sequence has got a slot at a lane, for the first time or after it lost one; it waited since sequence.queued_ns."""
        self.metrics.placed(sequence)
        if self.spans is not None:
            self.spans.placed(sequence)

    def requeued(self, sequence: "Sequence", setback: SpecwireError | None) -> None:
        """A sequence has lost its slot, and waits for another one; setback: what it was lost by, None if the coordinator took it away."""
        if self.spans is not None:
            self.spans.requeued(sequence, setback)

    def prefilled(self, sequence: "Sequence", now_ns: int) -> None:
        """A sequence has its first output from the slot that it has now, at now_ns."""
        if self.spans is not None:
            self.spans.prefilled(sequence, now_ns)

    def first_token(self, sequence: "Sequence") -> None:
        """A sequence's first output, at sequence.first_token_ns."""
        self.metrics.first_token(sequence)

    def asking(self, link: "DraftLink", round_: int) -> tuple[str, ...]:
        """A round is about to be sent to a drafter; returns its traceparents. Draft slots whose parent_round it is have rows in it."""
        return () if self.spans is None else self.spans.asking(link, round_)

    def launching(self, lane: "Lane", slots: list["Slot"], rows: list[VerifyRow], plan: "Plan") -> tuple[str, ...]:
        """The round lane.next_round is about to be sent to the verifier; returns its traceparents."""
        return () if self.spans is None else self.spans.launching(lane, slots, rows, plan)

    def answered(self, round_: "Round", result: VerifyResult) -> None:
        """A round's answer has come, and is about to be committed."""
        if self.spans is not None:
            self.spans.answered(round_, result)

    def committed(self, lane: "Lane", round_: "Round", result: VerifyResult, gaps: dict[tuple[int, int], int]) -> None:
        """A round's answer is committed.

        Args:
            gaps: how many sequences got so many tokens so many nanoseconds after their last ones: (gap, number of tokens) -> sequences.
        """
        self.metrics.committed(lane, round_, result, gaps)

    def priced(self, lane: "Lane", predicted_ms: float, measured_ms: float) -> None:
        """What adaptive verification expected a whole step of the lane to take, and what it took."""
        self.metrics.priced(lane, predicted_ms, measured_ms)

    def drafted(self, link: "DraftLink", result: DraftResult) -> None:
        """A drafter has answered what it was asked at link.asked.sent_ns."""
        self.metrics.drafted(link, result)

    def draft_missed(self, link: "DraftLink") -> None:
        """A drafter did not answer in time; the step goes on without it."""
        self.metrics.draft_missed(link)

    def sequence_ended(self, sequence: "Sequence", reason: str, error: SpecwireError | None) -> None:
        """A choice has ended: stop, length, cancelled or error; the last two with the error that its client gets."""
        self.metrics.sequence_ended(sequence, reason)
        if self.spans is not None:
            self.spans.sequence_ended(sequence, reason, error)

    def request_failed(self, error: SpecwireError) -> None:
        """All choices that were left of a request have ended with this error."""
        self.metrics.request_failed(error)

    def request_ended(self, request: "Request") -> None:
        """Every choice of a request has ended."""
        self.metrics.request_ended(request)
        if self.spans is not None:
            self.spans.request_ended(request)
