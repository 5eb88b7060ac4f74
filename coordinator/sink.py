"""Where the engine puts what it generates: one sink per request, filled inside the event loop."""

from collections.abc import Callable
from typing import Protocol

from specwire.messages import ChoiceDelta, ErrorStatus


class Sink(Protocol):
    """Takes the output of one request, from when `submit` has returned. No method blocks or raises; after the end of the request
    calls are ignored.

    A request has ended once every choice has had a delta with a finish_reason, or after `fail`, or when its client left.
    """

    def delta(self, index: int, token_ids: list[int], origins: bytes) -> None:
        """New tokens of one choice and nothing else; origins holds one TokenOrigin a token. The hot path: constant time. The sink may
        keep the list, which nobody changes any more."""

    def choice(self, delta: ChoiceDelta) -> None:
        """New tokens of one choice together with text, logprobs or its end. Follows the choice's earlier deltas in order."""

    def fail(self, error: ErrorStatus) -> None:
        """The whole request has failed: no choice of it goes on."""

    @property
    def num_backlog_tokens(self) -> int:
        """Tokens that the client has not been sent yet, over all choices."""

    def notify_below(self, num_tokens: int, callback: Callable[[], None]) -> None:
        """Calls back once, in the event loop, as soon as num_backlog_tokens is below num_tokens (at once if it is): what wakes a
        sequence that waits for a slow client. The call may come after the request has ended."""
