"""A sink that keeps what it gets, for tests that read it at the end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason, SpecStats, TokenLogprobs, Usage


@dataclass
class CollectedChoice:
    """Everything that one choice gave."""

    token_ids: list[int] = field(default_factory=list)
    origins: bytes = b""
    text: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_cause: int | str | None = None
    usage: Usage | None = None
    spec_stats: SpecStats | None = None
    error: ErrorStatus | None = None


class CollectingSink:
    """coordinator.sink.Sink. Reads at once, unless `holds`: then tokens pile up until `read`."""

    def __init__(self, num_choices: int = 1, *, holds: bool = False, on_tokens: Callable[[], None] = lambda: None) -> None:
        self.choices = [CollectedChoice() for _ in range(num_choices)]
        self.error: ErrorStatus | None = None
        self.num_unread = 0
        self._holds = holds
        self.on_tokens = on_tokens
        self._ended = asyncio.Event()
        self._notify: tuple[int, Callable[[], None]] | None = None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> "CollectingSink":
        await self._ended.wait()
        return self

    def delta(self, index: int, token_ids: list[int], origins: bytes) -> None:
        self._add(index, token_ids, origins)

    def choice(self, delta: ChoiceDelta) -> None:
        self._add(delta.index, delta.token_ids, delta.token_origins)
        choice = self.choices[delta.index]
        if delta.text is not None:
            choice.text = (choice.text or "") + delta.text
        choice.logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            assert choice.finish_reason is None, f"choice {delta.index} ends twice"
            choice.finish_reason, choice.stop_cause, choice.error = delta.finish_reason, delta.stop_cause, delta.error
            choice.usage, choice.spec_stats = delta.usage, delta.spec_stats
            if all(other.finish_reason is not None for other in self.choices):
                self._ended.set()

    def fail(self, error: ErrorStatus) -> None:
        assert not self.ended, "a request fails after its end"
        self.error = error
        self._ended.set()

    @property
    def num_backlog_tokens(self) -> int:
        return self.num_unread

    def notify_below(self, num_tokens: int, callback: Callable[[], None]) -> None:
        self._notify = num_tokens, callback

    def read(self, num_tokens: int) -> None:
        """The client reads so many of the tokens that are piled up."""
        self.num_unread = max(0, self.num_unread - num_tokens)
        if self._notify is not None and self.num_unread < self._notify[0]:
            (_, callback), self._notify = self._notify, None
            callback()

    def stop_holding(self) -> None:
        self._holds = False
        self.read(self.num_unread)

    def _add(self, index: int, token_ids: list[int], origins: bytes) -> None:
        choice = self.choices[index]
        assert not self.ended, f"{len(token_ids)} tokens after the end"
        assert choice.finish_reason is None, f"{len(token_ids)} tokens after the end of choice {index}"
        assert len(token_ids) == len(origins), f"{len(token_ids)} tokens with {len(origins)} origins"
        choice.token_ids += token_ids
        choice.origins += origins
        if self._holds:
            self.num_unread += len(token_ids)
        if token_ids:
            self.on_tokens()
