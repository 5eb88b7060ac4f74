"""Sends requests to an OpenAI-compatible HTTP API, ours or another engine's, and reads their streams."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from specwire.bench.http_client import HttpAnswer, HttpClient
from specwire.bench.record import RequestRecord
from specwire.bench.runner import Send
from specwire.bench.workload import Prompt
from specwire.client.generation import Deadline, Retries
from specwire.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SpecwireError,
    UnauthenticatedError,
    UnavailableError,
)  # fmt: skip
from specwire.messages import ChoiceDelta, FinishReason
from specwire.sampling_params import SamplingParams

_ERRORS: dict[int, type[SpecwireError]] = {
    401: UnauthenticatedError, 403: UnauthenticatedError, 408: DeadlineExceededError, 429: ResourceExhaustedError, 502: UnavailableError,
    503: UnavailableError, 504: DeadlineExceededError,
}  # fmt: skip
_REASONS = {reason.label: reason for reason in FinishReason}
UNKNOWN_ID = -1
"""Stands for a token whose id the server does not tell."""


def openai_backend(
    client: HttpClient,
    params: SamplingParams,
    *,
    model: str,
    tells_token_ids: bool,
    extra_body: Mapping[str, Any],
    timeout_s: float | None = None,
    max_retries: int = 0,
) -> Send:
    """A backend for runner.LoadGenerator.

    Args:
        params: of all requests; max_tokens is the prompt's own, and each request gets a seed of its own, params.seed + its number.
        model: what requests name.
        tells_token_ids: the server knows `return_token_ids`, which makes the number of tokens of each chunk exact. Otherwise a chunk of text counts
            as one token until the end, when the number that the server names is spread evenly over the chunks.
        extra_body: what requests have besides, or instead.
        timeout_s, max_retries: as of grpc_backend.
    """
    retries = Retries(max_retries)
    common = _sampling(params) | {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    common |= ({"return_token_ids": True} if tells_token_ids else {}) | dict(extra_body)

    async def send(prompt: Prompt, record: RequestRecord) -> AsyncGenerator[ChoiceDelta, None]:
        path, asked = _question(prompt)
        body: dict[str, Any] = {**asked, "max_tokens": prompt.max_tokens, **common}
        if params.seed is not None:
            body["seed"] = (params.seed + record.index) % 2**63
        message, deadline = json.dumps(body).encode(), Deadline(timeout_s)
        while True:
            has_tokens = False
            try:
                async with deadline.limit(), client.request("POST", path, message) as answer:
                    if answer.status != 200:
                        raise await _refusal(answer)
                    async for delta in _deltas(answer, record):
                        has_tokens = has_tokens or bool(delta.token_ids)
                        yield delta
                return
            except SpecwireError as error:
                pause_s = retries.pause_s(error, record.num_retries + 1, deadline, waits_for_room=True)
                if has_tokens or pause_s is None:
                    raise
            record.num_retries += 1
            await asyncio.sleep(pause_s)

    return send


def _question(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    if prompt.is_chat:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt.text}]}
    return "/v1/completions", {"prompt": prompt.text or prompt.token_ids}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The parameters as the API has them; what no server need know is left out where it changes nothing."""
    shown: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    if params.top_k > 0:
        shown["top_k"] = params.top_k
    if params.ignore_eos:
        shown["ignore_eos"] = True
    if params.max_draft_tokens is not None:
        shown["max_draft_tokens"] = params.max_draft_tokens
    return shown


async def _refusal(answer: HttpAnswer) -> SpecwireError:
    """The error that a status other than 200 stands for, in the server's words."""
    text = (await answer.read()).decode("utf-8", errors="replace")
    try:
        said = json.loads(text)["error"]
        said = said["message"] if isinstance(said, dict) else said
    except (ValueError, KeyError, TypeError):
        said = text[:200]
    kind = _ERRORS.get(answer.status, InternalError if answer.status >= 500 else InvalidArgumentError)
    wait = answer.headers.get("retry-after", "")
    return kind(f"status {answer.status}: {said}", retry_after_ms=1000 * int(wait) if wait.isdecimal() else None)


async def _deltas(answer: HttpAnswer, record: RequestRecord) -> AsyncGenerator[ChoiceDelta, None]:
    """What a stream of one choice gives; the token counts follow its end."""
    is_exact = True
    async for event in _events(answer):
        if "error" in event:
            said = event["error"]
            raise InternalError(f"the stream ended with an error: {said.get('message', said) if isinstance(said, dict) else said}")
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            token_ids = choice.get("token_ids")
            if token_ids is None:
                is_exact = False
                token_ids = [UNKNOWN_ID] if text else []
            record.texts.append(text)
            if token_ids:
                yield ChoiceDelta(0, token_ids)
            if reason := choice.get("finish_reason"):
                yield ChoiceDelta(0, finish_reason=_REASONS.get(reason, FinishReason.STOP))
        if usage := event.get("usage"):
            record.num_prompt_tokens = usage["prompt_tokens"]
            if not is_exact and record.chunk_sizes:
                record.chunk_sizes = _spread(max(usage["completion_tokens"], len(record.chunk_sizes)), len(record.chunk_sizes))


async def _events(answer: HttpAnswer) -> AsyncGenerator[dict[str, Any], None]:
    """Server-sent events with JSON, up to [DONE]; then the rest is read, so that the connection can be used again."""
    pending, is_done = b"", False
    async for data in answer.chunks():
        if is_done:
            continue
        *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            text = b"\n".join(line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if text == b"[DONE]":
                is_done = True
            elif text and not is_done:
                try:
                    yield json.loads(text)
                except ValueError as error:
                    raise InternalError(f"the stream has an event that is no JSON ({error}): {text[:100]!r}") from None
    if not is_done:
        raise UnavailableError("the stream ended without [DONE]")


def _spread(total: int, count: int) -> list[int]:
    """`total` as `count` whole numbers that differ by 1 at most."""
    return [(index + 1) * total // count - index * total // count for index in range(count)]
