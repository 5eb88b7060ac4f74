"""An engine without models: the coordinator's interface of submit, cancel and readiness, with output that a test can predict."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from coordinator.metrics import Metrics
from coordinator.sink import Sink
from coordinator.stop import StopRules
from specwire.errors import InvalidArgumentError, ResourceExhaustedError
from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason, GenerateRequest, SpecStats, TokenizerSpec, TokenLogprobs, TokenOrigin, Usage
from specwire.tokenizer import Tokenizer


class Readiness(NamedTuple):
    is_ready: bool
    reason: str


def expected_tokens(prompt: list[int], index: int, count: int, vocab_size: int, start: int = 0) -> list[int]:
    """Tokens `start` to `count` of choice `index`: they count up from the prompt's last token."""
    return [(prompt[-1] + 1 + index + i) % vocab_size for i in range(start, count)]


class ScriptedRequest:
    """One request; `step` gives each running choice its next tokens."""

    def __init__(self, engine: "ScriptedEngine", request: GenerateRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.num_tokens = [0] * request.sampling.n
        self.running = set(range(request.sampling.n))
        self.is_cancelled = False
        self.is_waiting_for_client = False
        self._engine = engine
        params = request.sampling
        self._rules = [
            StopRules(params, engine.eos_token_ids, len(request.prompt_token_ids), engine.max_model_len, engine.loaded_tokenizer)
            for _ in range(params.n)
        ]

    def cancel(self) -> None:
        if self.running:
            self.is_cancelled = True
            for index in sorted(self.running):
                self._end(index, [], FinishReason.CANCELLED)
            self._engine.live.remove(self)

    def fail(self, error: ErrorStatus) -> None:
        self.running.clear()
        self._engine.live.remove(self)
        self.sink.fail(error)

    def step(self) -> None:
        engine = self._engine
        if self.is_waiting_for_client:
            return
        if self.sink.num_backlog_tokens > engine.max_stream_backlog:
            self.is_waiting_for_client = True
            self.sink.notify_below(engine.max_stream_backlog // 2, self._go_on)
            return
        for index in sorted(self.running):
            before = self.num_tokens[index]
            token_ids = expected_tokens(self.request.prompt_token_ids, index, before + engine.tokens_per_step, engine.vocab_size, before)
            outcome = self._rules[index].push(token_ids)
            token_ids = token_ids[: outcome.num_taken]
            self.num_tokens[index] += len(token_ids)
            if outcome.finish_reason is None and outcome.text is None and self.request.sampling.logprobs is None:
                self.sink.delta(index, token_ids, bytes([TokenOrigin.ACCEPTED]) * len(token_ids))
            else:
                self._end(index, token_ids, outcome.finish_reason, outcome.stop_cause, outcome.text)
        if not self.running:
            engine.live.remove(self)

    def _go_on(self) -> None:
        self.is_waiting_for_client = False
        self._engine.wake()

    def _end(self, index: int, token_ids: list[int], reason: FinishReason | None, cause: int | str | None = None, text: str | None = None) -> None:
        logprobs = self.request.sampling.logprobs
        if reason is not None:
            self.running.discard(index)
        self.sink.choice(
            ChoiceDelta(
                index,
                token_ids,
                bytes([TokenOrigin.ACCEPTED]) * len(token_ids),
                text=text,
                logprobs=None if logprobs is None else [TokenLogprobs(-0.5, [(i, -0.5 - i) for i in range(logprobs)]) for _ in token_ids],
                finish_reason=reason,
                stop_cause=cause,
                usage=None if reason is None else Usage(len(self.request.prompt_token_ids), 0, self.num_tokens[index]),
                spec_stats=None
                if reason is None
                else SpecStats(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, accepted_per_position=(2, 1, 0)),
            )
        )


class ScriptedEngine:
    """Steps by itself, one step a turn of the loop, unless `is_paused`; then `step` does it by hand."""

    def __init__(self, tokenizer: TokenizerSpec | None = None, *, vocab_size: int = 1000, max_queue: int = 10_000) -> None:
        self.tokenizer = tokenizer
        self.loaded_tokenizer = Tokenizer(tokenizer) if tokenizer else None
        self.eos_token_ids = tokenizer.eos_token_ids if tokenizer else ()
        self.vocab_size = tokenizer.vocab_size if tokenizer else vocab_size
        self.max_model_len = 1 << 30
        self.max_stream_backlog = 1024
        self.tokens_per_step = 4
        self.max_queue = max_queue
        self.retry_after_ms: int | None = None
        self.num_refused = 0
        self.is_paused = False
        self.num_steps = 0
        self.ready = Readiness(True, "")
        self.metrics = Metrics()
        self.requests: list[ScriptedRequest] = []
        self.live: list[ScriptedRequest] = []
        self.on_step: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def submit(self, request: GenerateRequest, sink: Sink) -> ScriptedRequest:
        if not request.prompt_token_ids:
            raise InvalidArgumentError("the prompt is empty; send at least one token id")
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidArgumentError(f"the prompt holds token id {token_id}, but ids must be from 0 to {self.vocab_size - 1}")
        if len(self.live) >= self.max_queue:
            self.num_refused += 1
            raise ResourceExhaustedError(
                f"{len(self.live)} requests are waiting, and at most {self.max_queue} may; try again later", retry_after_ms=self.retry_after_ms
            )
        scripted = ScriptedRequest(self, request, sink)
        self.requests.append(scripted)
        self.live.append(scripted)
        self.wake()
        return scripted

    def set_ready(self, is_ready: bool, reason: str = "") -> None:
        self.ready = Readiness(is_ready, reason)
        self._changed.set()

    def watch_model(self, tell: Callable[[], None]) -> None:
        """It never changes."""

    async def readiness_changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        self._wake.set()

    def step(self) -> None:
        self.num_steps += 1
        for request in list(self.live):
            request.step()
        self.on_step()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            if self.is_paused or all(request.is_waiting_for_client for request in self.live):
                self._wake.clear()
                await self._wake.wait()
            else:
                self.step()
                await asyncio.sleep(0)
