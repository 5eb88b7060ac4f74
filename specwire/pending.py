"""What a request has generated and its reader has not taken yet, gathered without ever waiting: on both ends of a stream."""

from collections.abc import Callable, Iterable

from specwire.messages import ChoiceDelta, ErrorStatus, TokenLogprobs

_BYTES_PER_ENTRY = 64
_BYTES_PER_TOKEN = 5
_BYTES_PER_LOGPROB = 8


class PendingChoice:
    """Everything of one choice that waits for the next message, however many steps it came from."""

    __slots__ = ("_last", "_logprobs", "_text", "index", "is_plain", "token_ids", "token_origins")

    def __init__(self, index: int, token_ids: list[int], token_origins: bytes) -> None:
        self.index = index
        self.token_ids = token_ids
        self.token_origins = token_origins
        self.is_plain = True  # token ids only
        self._text: str | None = None
        self._logprobs: list[TokenLogprobs] | None = None
        self._last: ChoiceDelta | None = None

    @property
    def num_bytes(self) -> int:
        """About how long it is on the wire."""
        num_bytes = _BYTES_PER_ENTRY + _BYTES_PER_TOKEN * len(self.token_ids)
        if self._text is not None:
            num_bytes += 4 * len(self._text)
        if self._logprobs is not None:
            num_bytes += _BYTES_PER_LOGPROB * sum(1 + len(entry.top) for entry in self._logprobs)
        return num_bytes

    def add(self, delta: ChoiceDelta) -> None:
        self.token_ids += delta.token_ids
        self.token_origins += delta.token_origins
        if delta.text is not None:
            self._text = (self._text or "") + delta.text
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += delta.logprobs
        self._last = delta
        self.is_plain = False

    def to_delta(self) -> ChoiceDelta:
        last = self._last or ChoiceDelta(self.index)
        return ChoiceDelta(
            index=self.index,
            token_ids=self.token_ids,
            token_origins=self.token_origins,
            text=self._text,
            logprobs=self._logprobs,
            finish_reason=last.finish_reason,
            stop_cause=last.stop_cause,
            usage=last.usage,
            spec_stats=last.spec_stats,
            error=last.error,
            draft_report=last.draft_report,
        )


class RequestSink:
    """Gathers the output of one request for whoever takes it: in the coordinator the engine's sink, in a client the request's inbox.

    Args:
        num_choices: the request has ended when as many choices have.
        on_pending: called when there is something to take, and not again until it was taken.
        whole: there is nothing to take, and no backlog, until the request has ended.
    """

    __slots__ = ("_is_announced", "_num_backlog_tokens", "_num_running", "_on_pending", "_pending", "_waiters", "_whole", "ended", "error")

    def __init__(self, num_choices: int, on_pending: Callable[["RequestSink"], None], *, whole: bool = False) -> None:
        self.ended = False
        self.error: ErrorStatus | None = None
        self._num_running = num_choices
        self._on_pending = on_pending
        self._whole = whole
        self._pending: dict[int, PendingChoice] = {}
        self._is_announced = False
        self._num_backlog_tokens = 0
        self._waiters: list[Callable[[], None]] = []

    def delta(self, index: int, token_ids: list[int], origins: bytes) -> None:
        if self.ended:
            return
        pending = self._pending.get(index)
        if pending is None:
            self._pending[index] = PendingChoice(index, [*token_ids], origins)
        else:
            pending.token_ids += token_ids
            pending.token_origins += origins
        self._grew(len(token_ids))

    def choice(self, delta: ChoiceDelta) -> None:
        if self.ended:
            return
        pending = self._pending.get(delta.index)
        if pending is None:
            pending = self._pending[delta.index] = PendingChoice(delta.index, [], b"")
        pending.add(delta)
        if delta.finish_reason is not None:
            self._num_running -= 1
            self.ended = self._num_running == 0
        self._grew(len(delta.token_ids))

    def fail(self, error: ErrorStatus) -> None:
        if not self.ended:
            self.ended, self.error = True, error
            self._grew(0)

    @property
    def num_backlog_tokens(self) -> int:
        return 0 if self._whole else self._num_backlog_tokens

    def notify_below(self, num_tokens: int, callback: Callable[[], None]) -> None:
        if self.num_backlog_tokens < num_tokens:
            callback()
        else:
            self._waiters.append(callback)  # `take` leaves no backlog, so the number no longer matters

    def take(self) -> Iterable[PendingChoice]:
        """All that waits, one entry a choice; from now on it counts as sent."""
        taken, self._pending = self._pending, {}
        self._is_announced = False
        self._num_backlog_tokens = 0
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for callback in waiters:
                callback()
        return taken.values()

    def _grew(self, num_tokens: int) -> None:
        self._num_backlog_tokens += num_tokens
        if not self._is_announced and (self.ended or not self._whole):
            self._is_announced = True
            self._on_pending(self)
