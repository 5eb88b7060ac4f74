"""What metrics and spans are made of: the step and the ends of requests tell it here, inside the event loop, so everything must be cheap."""

from typing import TYPE_CHECKING

from specwire.errors import SpecwireError
from specwire.messages import DraftResult, VerifyResult

if TYPE_CHECKING:
    from .lane import Lane
    from .link import DraftLink
    from .sequence import Request, Sequence
    from .slots import Round


class Telemetry:
    """Hands on what happens. Times are time.monotonic_ns()."""

    def admitted(self, request: "Request") -> None:
        """A request has come, at request.arrived_ns; its sequences wait from now on."""

    def placed(self, sequence: "Sequence") -> None:
        """A sequence has got a slot at a lane, for the first time or after it lost one; it waited since sequence.queued_ns."""

    def first_token(self, sequence: "Sequence") -> None:
        """A sequence's first output, at sequence.first_token_ns."""

    def committed(self, lane: "Lane", round_: "Round", result: VerifyResult, gaps: dict[tuple[int, int], int]) -> None:
        """A round's answer is committed.

        Args:
            gaps: how many sequences got so many tokens so many nanoseconds after their last ones: (gap, number of tokens) -> sequences.
        """

    def drafted(self, link: "DraftLink", result: DraftResult, asked_at_s: float) -> None:
        """A drafter has answered what it was asked at asked_at_s (loop time)."""

    def draft_missed(self, link: "DraftLink", asked_at_s: float, waited_s: float) -> None:
        """A drafter did not answer in time; the step goes on without it."""

    def sequence_ended(self, sequence: "Sequence", reason: str) -> None:
        """A choice has ended: stop, length, cancelled or error."""

    def request_failed(self, request: "Request", error: SpecwireError) -> None:
        """All choices that are left end with this error."""

    def request_ended(self, request: "Request") -> None:
        """Every choice of a request has ended."""
