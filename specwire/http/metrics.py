"""The HTTP process's metrics by name, and what a generation tells them."""

import time
from functools import partial

from specwire.client import GenerationResult, StreamEvent
from specwire.http.board import Board, Layout
from specwire.messages import FinishReason, Usage
from specwire.metrics import LATENCY_BOUNDS, NUM_TOKENS_BOUNDS, STEP_BOUNDS, make_counter, make_gauge, make_histogram

ENDPOINTS = ("completions", "chat_completions", "models", "tokenize", "detokenize", "other")
CODES = ("200", "400", "401", "404", "405", "413", "415", "429", "499", "500", "503", "504")
"""Statuses that requests are answered with; 499 stands for clients that did not wait for an answer."""
PHASES = ("waiting", "streaming")
REASONS = tuple(reason.label for reason in FinishReason)

_counter, _gauge, _histogram = partial(make_counter, "http"), partial(make_gauge, "http"), partial(make_histogram, "http")
REQUESTS = _counter("requests", "answered requests; 499: the client did not wait", "endpoint", "code")
DISCONNECTS = _counter("disconnects", "clients that left before the end: while they waited for the answer, or in a stream", "phase")
STALLED_CLIENTS = _counter(
    "stalled_clients", "connections that were cut because their clients read or sent nothing for client_stall_s; disconnects, too"
)
FAILED_STREAMS = _counter("failed_streams", "streams that ended with an error event")
CHOICES = _counter("choices", "ended choices of generations", "reason")
PROMPT_TOKENS = _counter("prompt_tokens", "prompt tokens of generations, once for all choices")
GENERATED_TOKENS = _counter("generated_tokens", "tokens delivered to clients")
LOOKED_UP_TOKENS = _counter("looked_up_tokens", "prompt tokens of ended choices, each of which looks for them in the verifier's prefix cache")
CACHED_TOKENS = _counter("cached_tokens", "those of them that were there")
FAILED_RELOADS = _counter("failed_reloads", "changed TLS files that could not be used")
STATUS_FAILURES = _counter("status_failures", "scrapes for which the coordinator did not give its state (vllm_metrics)")
SPANS = _counter("spans", "spans of traced requests")
LOST_SPANS = _counter("lost_spans", "those of them that were not exported: the queue was full, or the collector or the file failed")
READY = _gauge("ready_processes", "processes that take requests")
RUNNING = _gauge("running_requests", "requests that are not answered, or whose stream has not ended")
TIME_TO_FIRST_TOKEN = _histogram("time_to_first_token_seconds", "from a request's arrival to the first token of each choice; streams only")
INTER_TOKEN_LATENCY = _histogram("inter_token_latency_seconds", "between tokens of a choice: an event's gap in equal parts; streams only")
DECODE = _histogram("decode_seconds", "from the first token of a choice to its end; streams only")
TIME_PER_TOKEN = _histogram("time_per_output_token_seconds", "that time by the tokens after the first one, one value a choice; streams only")
GENERATION = _histogram("generation_seconds", "from the arrival of a request for a generation to its end")
PROMPT_LENGTH = _histogram("request_prompt_tokens", "prompt length of generations that ended well")
CHOICE_LENGTH = _histogram("choice_tokens", "generated tokens of ended choices")

_NO_LABELS: tuple[tuple[str, ...], ...] = ((),)
_FAMILIES = (
    (REQUESTS, tuple((endpoint, code) for endpoint in ENDPOINTS for code in CODES)),
    (DISCONNECTS, tuple((phase,) for phase in PHASES)),
    (FAILED_STREAMS, _NO_LABELS),
    (CHOICES, tuple((reason,) for reason in REASONS)),
    *(
        (metric, _NO_LABELS)
        for metric in (
            STALLED_CLIENTS, PROMPT_TOKENS, GENERATED_TOKENS, LOOKED_UP_TOKENS, CACHED_TOKENS, FAILED_RELOADS, STATUS_FAILURES, SPANS, LOST_SPANS,
            READY, RUNNING,
        )
    ),
    *(
        (metric, _NO_LABELS)
        for metric in (TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, DECODE, TIME_PER_TOKEN, GENERATION, PROMPT_LENGTH, CHOICE_LENGTH)
    ),
)  # fmt: skip
METRICS = tuple(metric for metric, _ in _FAMILIES)
LAYOUT = Layout(
    _FAMILIES,
    {
        TIME_TO_FIRST_TOKEN.name: LATENCY_BOUNDS,
        INTER_TOKEN_LATENCY.name: STEP_BOUNDS,
        DECODE.name: LATENCY_BOUNDS,
        TIME_PER_TOKEN.name: STEP_BOUNDS,
        GENERATION.name: LATENCY_BOUNDS,
        PROMPT_LENGTH.name: NUM_TOKENS_BOUNDS,
        CHOICE_LENGTH.name: NUM_TOKENS_BOUNDS,
    },
)


class GenerationClock:
    """Follows one request for a generation.

    Args:
        board: counts.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._started_ns = time.monotonic_ns()
        self._first_ns: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}

    def event(self, index: int, event: StreamEvent) -> None:
        """Part of a stream, of the choice with this index."""
        num_tokens = len(event.token_ids)
        if num_tokens:
            now = time.monotonic_ns()
            last = self._last_ns.get(index)
            if last is None:
                self._first_ns[index] = now
                self._board.observe(TIME_TO_FIRST_TOKEN, now - self._started_ns)
            else:
                self._board.observe(INTER_TOKEN_LATENCY, (now - last) // num_tokens, num_tokens)
            self._last_ns[index] = now
            self._board.add(GENERATED_TOKENS, amount=num_tokens)
        if event.finish_reason is not None:
            self._ended(event.finish_reason, event.usage)
            if index in self._first_ns:
                self._decoded(time.monotonic_ns() - self._first_ns[index], event.usage)

    def result(self, result: GenerationResult) -> None:
        """Everything of one prompt."""
        for choice in result.choices:
            self._board.add(GENERATED_TOKENS, amount=len(choice.token_ids))
            self._ended(choice.finish_reason, choice.usage)

    def prompt(self, num_tokens: int) -> None:
        """A prompt was accepted."""
        self._board.add(PROMPT_TOKENS, amount=num_tokens)
        self._board.observe(PROMPT_LENGTH, num_tokens)

    def end(self) -> None:
        """The request has ended, well or not."""
        self._board.observe(GENERATION, time.monotonic_ns() - self._started_ns)

    def _ended(self, reason: str, usage: Usage | None) -> None:
        self._board.add(CHOICES, (reason,))
        self._board.observe(CHOICE_LENGTH, usage.num_generated_tokens if usage else 0)
        if usage:
            self._board.add(LOOKED_UP_TOKENS, amount=usage.num_prompt_tokens)
            self._board.add(CACHED_TOKENS, amount=usage.num_cached_tokens)

    def _decoded(self, decode_ns: int, usage: Usage | None) -> None:
        self._board.observe(DECODE, decode_ns)
        if usage and usage.num_generated_tokens > 1:
            self._board.observe(TIME_PER_TOKEN, decode_ns // (usage.num_generated_tokens - 1))
