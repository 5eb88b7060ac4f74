"""A backend that gives what a test says, when it says so."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from specwire.bench.record import RequestRecord
from specwire.bench.runner import Send
from specwire.bench.workload import Prompt
from specwire.errors import SpecwireError
from specwire.messages import ChoiceDelta, FinishReason, SpecStats, Usage

_NO_SPEC = SpecStats()


@dataclass(frozen=True)
class Answer:
    """chunks: (seconds since the one before, tokens); error: what it fails with after them."""

    chunks: Sequence[tuple[float, int]]
    spec: SpecStats = _NO_SPEC
    num_cached_tokens: int = 0
    error: Exception | None = None
    finish_reason: FinishReason | None = FinishReason.LENGTH


def fake_backend(answers: Sequence[Answer]) -> Send:
    """Answers request i with number i of them, and from the start again."""

    async def send(prompt: Prompt, record: RequestRecord) -> AsyncGenerator[ChoiceDelta, None]:
        answer = answers[record.index % len(answers)]
        for number, (pause_s, num_tokens) in enumerate(answer.chunks, start=1):
            await asyncio.sleep(pause_s)
            is_last = number == len(answer.chunks) and answer.error is None
            usage = Usage(len(prompt.token_ids), answer.num_cached_tokens, 0) if is_last else None
            yield ChoiceDelta(
                0, [7] * num_tokens, finish_reason=answer.finish_reason if is_last else None, usage=usage, spec_stats=answer.spec if is_last else None
            )
        if answer.error is not None:
            raise answer.error

    return send


def prompts(count: int, num_tokens: int = 4) -> list[Prompt]:
    return [Prompt(str(index), [1] * num_tokens, 64) for index in range(count)]


class Refused(SpecwireError):
    """An error of the backend."""
