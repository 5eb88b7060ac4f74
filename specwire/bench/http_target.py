"""Load on a server with an OpenAI-compatible API."""

import asyncio
import json
import logging
import re
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

from specwire.bench.http_client import HttpClient
from specwire.bench.openai_backend import openai_backend
from specwire.bench.runner import Send
from specwire.bench.serve_options import ServeOptions
from specwire.bench.targets import ServerSide, Workload, made_up, repeated
from specwire.bench.workload import PromptLine, text_prompts
from specwire.errors import InvalidArgumentError, UnavailableError
from specwire.messages import SpecStats

logger = logging.getLogger(__name__)

_TELL_TOKEN_IDS = ("specwire", "vllm")
"""Owners of models whose servers know `return_token_ids`."""
_SPEC_COUNTER = re.compile(rb"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_POSITION = re.compile(rb'position="(\d+)"')
_PAUSE_S = 0.2


class HttpTarget:
    """A server with an OpenAI-compatible API.

    Args:
        model: what requests name; empty = the first one that it has.
        extra_body: what requests have besides.
        is_chat: prompts are questions.
    """

    def __init__(self, client: HttpClient, *, model: str = "", extra_body: dict[str, Any] | None = None, is_chat: bool = False) -> None:
        self.backend = "openai-chat" if is_chat else "openai"
        self.address = client.base_url
        self.model_id = model
        self._client = client
        self._extra_body = extra_body or {}
        self._tells_token_ids = False
        self._before: SpecStats | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.close()

    async def connect(self, timeout_s: float) -> None:
        models = await self._models(timeout_s)
        named = [model for model in models if model["id"] == self.model_id or not self.model_id]
        if not named:
            known = ", ".join(model["id"] for model in models) or "none"
            raise InvalidArgumentError(f"the server at {self.address} has no model {self.model_id!r}; it has {known}")
        self.model_id = named[0]["id"]
        self._tells_token_ids = named[0].get("owned_by") in _TELL_TOKEN_IDS

    def workload(self, options: ServeOptions, lines: list[PromptLine] | None) -> Workload:
        if lines is not None:
            return repeated(options, text_prompts(lines, options.lengths.output_len, as_chat=options.chat))
        if not options.vocab_size:
            raise InvalidArgumentError("over HTTP the size of the vocabulary is not known: give it with --vocab-size, or texts with --prompts")
        return made_up(options, list(range(options.vocab_size)))

    def sender(self, options: ServeOptions) -> Send:
        return openai_backend(
            self._client,
            options.params,
            model=self.model_id,
            tells_token_ids=self._tells_token_ids,
            extra_body=self._extra_body,
            timeout_s=options.timeout_s,
            max_retries=options.max_retries,
        )

    async def begin(self) -> None:
        self._before = await self._speculation()

    async def end(self) -> ServerSide:
        after = await self._speculation()
        if self._before is None or after is None:
            logger.warning(
                "the server's /metrics has no vllm:spec_decode counters, so nothing is known of speculation (ours: --set http.vllm_metrics=true)"
            )
            return ServerSide()
        return ServerSide(speculation=_difference(self._before, after))

    def text(self, token_ids: list[int]) -> str | None:
        return None

    async def _models(self, timeout_s: float) -> list[dict[str, Any]]:
        """What it lists once it serves."""
        deadline_s, problem = time.monotonic() + timeout_s, "it does not answer"
        while True:
            try:
                async with asyncio.timeout(max(0.001, deadline_s - time.monotonic())), self._client.request("GET", "/v1/models") as answer:
                    body = await answer.read()
                if answer.status == 200:
                    return list(json.loads(body)["data"])
                problem = f"status {answer.status}: {body[:200].decode(errors='replace')}"
                if answer.status < 500:
                    raise InvalidArgumentError(f"the server at {self.address} does not list its models ({problem})")
            except (UnavailableError, TimeoutError) as error:
                problem = str(error) or problem
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidArgumentError(f"what the server at {self.address} answers to /v1/models is no list of models ({error!r})") from None
            if time.monotonic() >= deadline_s:
                raise UnavailableError(f"the server at {self.address} does not serve after {timeout_s:g} s: {problem} (`specwire up` starts one)")
            await asyncio.sleep(_PAUSE_S)

    async def _speculation(self) -> SpecStats | None:
        """vLLM's counters of speculation, which other engines have, too; None if this one does not."""
        try:
            async with self._client.request("GET", "/metrics") as answer:
                return parse_speculation(await answer.read())
        except UnavailableError as error:
            logger.warning("the server's metrics can't be read: %s", error)
            return None


def parse_speculation(text: bytes) -> SpecStats | None:
    """The sum over all engines in an exposition for Prometheus; None without such counters."""
    counts: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for name, labels, value in _SPEC_COUNTER.findall(text):
        if position := _POSITION.search(labels):
            positions[int(position[1])] += int(float(value))
        else:
            counts[name.decode()] += int(float(value))
    if "drafts" not in counts:
        return None
    per_position = tuple(positions[index] for index in range(max(positions, default=-1) + 1))
    return SpecStats(counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"], per_position)


def _difference(before: SpecStats, after: SpecStats) -> SpecStats:
    earlier = before.accepted_per_position + (0,) * (len(after.accepted_per_position) - len(before.accepted_per_position))
    return SpecStats(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        tuple(late - early for late, early in zip(after.accepted_per_position, earlier, strict=False)),
    )
