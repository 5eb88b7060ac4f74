"""The plain tokens of a session's requests: they go straight into the session's next message, without a stop in each request's own sink."""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from operator import itemgetter

from specwire.messages import ChoiceDelta, ErrorStatus, StreamDelta
from specwire.pending import RequestSink

_BYTES_PER_DELTA = 64
_BYTES_PER_TOKEN = 5
_token_ids = itemgetter(StreamDelta._fields.index("token_ids"))
_new = tuple.__new__  # takes a third of the time that calling a named tuple's class does


class Outbox:
    """What waits for the next message, in the order in which it came.

    Attributes:
        deltas: one a step and choice.
        on_first: to be called by whoever adds the first one.
        number: of the message that is being filled: what waited for an earlier one is no backlog any more.
        has_repeats: a choice may be there twice: the client has not read for a step or more.
    """

    __slots__ = ("_waiters", "deltas", "has_repeats", "number", "on_first")

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.deltas: list[StreamDelta] = []
        self.number = 1
        self.has_repeats = False
        self.on_first = on_first
        self._waiters: list[Callable[[], None]] = []

    @property
    def num_streams(self) -> int:
        """How many requests have something here."""
        return len({delta.stream_id for delta in self.deltas})

    def wait(self, callback: Callable[[], None]) -> None:
        """Calls back at the next `take`."""
        self._waiters.append(callback)

    def take(self, max_bytes: int) -> tuple[list[StreamDelta], int]:
        """What a message of about max_bytes can hold, one delta a choice, and its bytes; the rest waits on."""
        deltas = merge_deltas(self.deltas) if self.has_repeats else self.deltas
        num_taken = len(deltas)
        num_bytes = _BYTES_PER_DELTA * num_taken + _BYTES_PER_TOKEN * sum(map(len, map(_token_ids, deltas)))
        if num_bytes > max_bytes:
            ends = list(accumulate(_BYTES_PER_DELTA + _BYTES_PER_TOKEN * len(delta.token_ids) for delta in deltas))
            num_taken = max(1, bisect_right(ends, max_bytes))
            num_bytes = ends[num_taken - 1]
        self.deltas, taken = deltas[num_taken:], deltas[:num_taken]
        self.has_repeats = bool(self.deltas)
        self.number += 1
        waiters, self._waiters = self._waiters, []
        for callback in waiters:
            callback()
        return taken, num_bytes


class SessionSink:
    """One request's sink in a session (coordinator.sink.Sink). From its first text, logprobs or end on everything goes to `rest`.

    Args:
        stream_id: the request's id in the session.
        num_choices: of the request.
        outbox: takes plain tokens.
        on_pending: called when `rest` has something to take, and not again until it was taken.
    """

    __slots__ = ("_is_plain", "_num_tokens", "_number", "_outbox", "_stream_id", "rest")

    def __init__(self, stream_id: int, num_choices: int, outbox: Outbox, on_pending: Callable[[RequestSink], None]) -> None:
        self.rest = RequestSink(num_choices, on_pending)
        self._stream_id = stream_id
        self._outbox = outbox
        self._is_plain = True
        self._number = 0
        self._num_tokens = 0

    def delta(self, index: int, token_ids: list[int], origins: bytes) -> None:
        if not self._is_plain:
            self.rest.delta(index, token_ids, origins)
            return
        outbox = self._outbox
        if self._number == outbox.number:
            outbox.has_repeats = True
            self._num_tokens += len(token_ids)
        else:
            self._number = outbox.number
            self._num_tokens = len(token_ids)
        deltas = outbox.deltas
        if not deltas:
            outbox.on_first()
        deltas.append(_new(StreamDelta, (self._stream_id, index, token_ids, origins)))

    def choice(self, delta: ChoiceDelta) -> None:
        self._is_plain = False
        self.rest.choice(delta)

    def fail(self, error: ErrorStatus) -> None:
        self._is_plain = False
        self.rest.fail(error)

    @property
    def num_backlog_tokens(self) -> int:
        num_tokens = self._num_tokens if self._number == self._outbox.number else 0
        return num_tokens if self._is_plain else num_tokens + self.rest.num_backlog_tokens

    def notify_below(self, num_tokens: int, callback: Callable[[], None]) -> None:
        if self.num_backlog_tokens < num_tokens:
            callback()
        elif self._number == self._outbox.number:
            self._outbox.wait(callback)
        else:
            self.rest.notify_below(num_tokens, callback)


def merge_deltas(deltas: list[StreamDelta]) -> list[StreamDelta]:
    """One delta a choice, in the order of its first one."""
    merged: dict[tuple[int, int], StreamDelta] = {}
    for delta in deltas:
        key = delta.stream_id, delta.choice_index
        earlier = merged.get(key)
        if earlier is None:
            merged[key] = delta._replace(token_ids=[*delta.token_ids])
        else:
            earlier.token_ids.extend(delta.token_ids)
            merged[key] = earlier._replace(token_origins=earlier.token_origins + delta.token_origins)
    return list(merged.values())
