"""OpenAI's own client where it does more than one call: its helper for streams, streams that are left, its blocking twin; and counts that agree."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.coordinator.byte_tokenizer import make_tokenizer
from tests.http.serving import Served, http_served
from tests.http.test_text import LONG, PIECES, WORDS

MODEL = "scripted"
MESSAGES: Any = [{"role": "user", "content": WORDS}]
CHAT_PROMPT = f"<user>{WORDS}<assistant>"


@pytest.fixture
async def unicode_served(socket_dir: Path) -> AsyncIterator[Served]:
    """A target that says pieces of emoji, CJK and ZWJ families."""
    async with http_served(socket_dir, verifier={"alphabet": PIECES + LONG + tuple(b"ab")}) as served:
        yield served


@pytest.mark.parametrize("stop", [None, "b", ["é", "a"], "never said"])
async def test_usage_logprobs_and_tokens_have_one_count(unicode_served: Served, stop: Any) -> None:
    """Wherever a stop text ends a choice: in the middle of a token or of a block of accepted drafts, in one choice and not in the other."""
    create = unicode_served.openai.completions.create
    reasons = set()
    for seed in range(6):
        sent: Any = {"model": MODEL, "prompt": WORDS, "max_tokens": 40, "seed": seed, "n": 2, "stop": stop, "logprobs": 1}
        sent["extra_body"] = {"return_token_ids": True}
        whole = await create(**sent)
        token_ids: dict[int, list[int]] = {0: [], 1: []}
        tokens: dict[int, list[str]] = {0: [], 1: []}
        texts = {0: "", 1: ""}
        usage = None
        async for chunk in await create(**sent, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                token_ids[choice.index] += choice.token_ids  # type: ignore[attr-defined]
                tokens[choice.index] += (choice.logprobs.tokens or []) if choice.logprobs else []
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert token_ids[choice.index] == choice.token_ids  # type: ignore[attr-defined]
            assert tokens[choice.index] == choice.logprobs.tokens
            assert len(tokens[choice.index]) == len(choice.logprobs.token_logprobs or []) == len(token_ids[choice.index])
            assert texts[choice.index] == choice.text
            reasons.add(choice.finish_reason)
        assert whole.usage is not None
        assert usage is not None
        assert whole.usage.completion_tokens == usage.completion_tokens == sum(map(len, token_ids.values()))
    assert reasons == {"length"} if stop in (None, "never said") else "stop" in reasons


async def test_helper_for_streams(unicode_served: Served) -> None:
    """It puts an answer together from its events: the same as at once, and what the tokens stand for."""
    completions = unicode_served.openai.chat.completions
    sent: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "seed": 2, "n": 2, "stop": "b", "logprobs": True, "top_logprobs": 2}
    whole = await completions.create(**sent)
    async with completions.stream(**sent, stream_options={"include_usage": True}) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    for index, (one, other) in enumerate(zip(streamed.choices, whole.choices, strict=True)):
        ids = unicode_served.verifier.target.generate(list(CHAT_PROMPT.encode()), 300, 2, index)
        assert one.message.content == other.message.content == make_tokenizer().decode(ids).partition("b")[0]
        assert (one.finish_reason, one.logprobs) == (other.finish_reason, other.logprobs)


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_ends_it_everywhere(socket_dir: Path, n: int) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.002}) as served:
        for num_read in (1, 5):
            stream = await served.openai.completions.create(model=MODEL, prompt="a", max_tokens=450, n=n, stream=True)
            async for _ in first_of(stream, num_read):
                pass
            await stream.close()
            await served.until_idle()
        assert served.verifier.num_rows > 0


async def test_blocking_client(served: Served) -> None:
    """In a thread, as programs without an event loop use it."""

    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            sent: Any = {"model": MODEL, "prompt": "once", "max_tokens": 20, "seed": 1}
            whole = client.completions.create(**sent).choices[0].text
            return whole, "".join(chunk.choices[0].text for chunk in client.completions.create(**sent, stream=True))

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed == bytes(served.verifier.target.generate(list(b"once"), 20, 1)).decode()


async def first_of(stream: Any, number: int) -> AsyncIterator[Any]:
    """The first events of a stream."""
    for _ in range(number):
        yield await anext(stream)
