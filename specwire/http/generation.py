"""One request for generations: of one or several prompts, answered whole or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from specwire.client import AsyncClient, Choice, GenerationResult, StreamEvent
from specwire.errors import InternalError
from specwire.http.formats import AnswerHead, Format, usage_of
from specwire.http.metrics import GenerationClock
from specwire.http.streaming import merge
from specwire.messages import Usage
from specwire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """What is to be generated, and how it is shown.

    Args:
        prompts: token ids of each.
        label: of the request, for logs and traces.
        variant: base or canary; empty = by share.
    """

    client: AsyncClient
    prompts: Sequence[list[int]]
    params: SamplingParams
    format: Format
    head: AnswerHead
    label: str
    variant: str = ""

    async def whole(self, clock: GenerationClock) -> dict[str, Any]:
        """The answer. An error of one prompt or choice is one of all.

        Raises:
            SpecwireError: something failed; nothing goes on.
        """
        tasks = [asyncio.create_task(self._one(position)) for position in range(len(self.prompts))]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            clock.prompt(len(result.prompt_token_ids))
            clock.result(result)
        numbered = [(self._index(position, choice.index), choice) for position, result in enumerate(results) for choice in result.choices]
        choices = [self.format.choice(index, choice) for index, choice in numbered]
        return self.head.answer(self.format.kind, choices, usage=usage_of([[choice.usage for choice in result.choices] for result in results]))

    async def stream(self, clock: GenerationClock, *, includes_usage: bool, counts_on: bool = False) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of the answer: of each choice one with its finish_reason, and the token counts at the end, if wanted.

        Args:
            counts_on: where counts are wanted, each part has its choice's so far.

        Raises:
            SpecwireError: something failed; nothing goes on.
        """
        streams = [
            self.client.stream(prompt, self.params, request_id=self._label(position), variant=self.variant)
            for position, prompt in enumerate(self.prompts)
        ]
        usages: list[list[Usage]] = [[] for _ in self.prompts]
        num_generated: dict[int, int] = {}
        more: dict[str, Any] = {"usage": None} if includes_usage else {}
        async for position, event in merge(streams):
            _check_end(event)
            index = self._index(position, event.index)
            is_first = index not in num_generated
            num_generated[index] = num_generated.get(index, 0) + len(event.token_ids)
            if includes_usage and counts_on:
                num_prompt = len(self.prompts[position])
                counts = {"prompt_tokens": num_prompt, "completion_tokens": num_generated[index], "total_tokens": num_prompt + num_generated[index]}
                more = {"usage": counts}
            if is_first and (beginning := self.format.begin(index)) is not None:
                yield self.head.answer(self.format.stream_kind, [beginning], **more)
            clock.event(index, event)
            if event.usage is not None:
                usages[position].append(event.usage)
            if (part := self.format.part(index, event)) is not None:
                yield self.head.answer(self.format.stream_kind, [part], **more)
        for prompt in self.prompts:
            clock.prompt(len(prompt))
        if includes_usage:
            yield self.head.answer(self.format.stream_kind, [], usage=usage_of(usages))

    async def _one(self, position: int) -> GenerationResult:
        result = await self.client.generate(self.prompts[position], self.params, request_id=self._label(position), variant=self.variant)
        for choice in result.choices:
            _check_end(choice)
        return result

    def _index(self, position: int, choice: int) -> int:
        return position * self.params.n + choice

    def _label(self, position: int) -> str:
        return self.label if len(self.prompts) == 1 else f"{self.label} {position}"


def _check_end(part: Choice | StreamEvent) -> None:
    """Raise the error with which a choice ended, if it did not end well."""
    if part.error is not None:
        raise part.error
    if part.finish_reason not in (None, "stop", "length"):
        raise InternalError(f"choice {part.index} ended with {part.finish_reason}, but without an error")
