"""Conversations: the served template makes the prompt, tools and its own variables included, in every call that takes a prompt."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specwire import AsyncClient, Chat
from specwire.errors import FailedPreconditionError, InvalidArgumentError, SpecwireError, UnsupportedError
from tests.client.served import CHAT_TEMPLATE
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving

HELLO = [{"role": "system", "content": "Bé brief."}, {"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine(dataclasses.replace(make_spec(), chat_template=CHAT_TEMPLATE))


@pytest.fixture
async def client(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[AsyncClient]:
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0]) as client:
        yield client


def last_prompt(engine: ScriptedEngine) -> str:
    return bytes(engine.requests[-1].request.prompt_token_ids).decode()


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ({}, "<system>Bé brief.<user>hello<assistant>"),
        ({"add_generation_prompt": False}, "<system>Bé brief.<user>hello"),
        ({"tools": [TOOL]}, '<system>Bé brief.<user>hello[{"type": "function", "function": {"name": "now"}}]<assistant>'),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<system>Bé brief.<user>hello<assistant><think>"),
    ],
)
async def test_the_template_makes_the_prompt(client: AsyncClient, engine: ScriptedEngine, arguments: dict[str, Any], prompt: str) -> None:
    whole = await client.chat(HELLO, max_tokens=5, n=2, **arguments)
    assert last_prompt(engine) == prompt
    texts = ["", ""]
    async for event in client.chat_stream(HELLO, max_tokens=5, n=2, **arguments):
        texts[event.index] += event.text
    assert last_prompt(engine) == prompt
    assert texts == [choice.text for choice in whole.choices]
    async for _, outcome in client.generate_batch([Chat(HELLO, **arguments)], max_tokens=5, n=2):
        assert not isinstance(outcome, SpecwireError)
        assert outcome.prompt_token_ids == whole.prompt_token_ids == list(prompt.encode())


async def test_all_of_generate_works_with_conversations(client: AsyncClient, engine: ScriptedEngine) -> None:
    result = await client.chat(HELLO, max_tokens=4, logprobs=1, request_id="label", timeout=60)
    request = engine.requests[-1].request
    assert (request.request_id, request.sampling.logprobs, len(result.choices[0].logprobs or ())) == ("label", 1, 4)
    assert request.timeout_ms is not None


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ("hello", "messages is 'hello'"),
        ({"role": "user"}, "messages is {'role': 'user'}"),
        ([], "messages is empty"),
        (["hello"], "'hello' at position 0"),
        ([HELLO[0], {"content": "x"}], "at position 1"),
        ([{"role": 5, "content": "x"}], "at position 0"),
        ([HELLO[0], {"role": "user"}], "messages holds {'role': 'user'} at position 1, which has no key 'content'; add it"),
        (None, "messages is None"),
    ],
)
async def test_wrong_messages_are_named(client: AsyncClient, engine: ScriptedEngine, messages: Any, part: str) -> None:
    with pytest.raises(InvalidArgumentError) as failure:
        await client.chat(messages)
    assert part in str(failure.value)
    with pytest.raises(InvalidArgumentError):
        client.chat_stream(messages)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"chat_template_kwargs": {"enable_thinkng": True}}, "enable_thinkng, which the model's chat template does not read; besides messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has messages"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs has bos_token"),
    ],
)
async def test_what_the_template_does_not_read_is_refused(client: AsyncClient, arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidArgumentError) as failure:
        await client.chat(HELLO, **arguments)
    assert part in str(failure.value)


async def test_a_key_that_the_template_needs_is_named(socket_dir: Path) -> None:
    template = "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"
    engine = ScriptedEngine(dataclasses.replace(make_spec(), chat_template=template))
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0]) as client:
        with pytest.raises(InvalidArgumentError, match=r"refuses the messages: the one at position 1 \(user\) has no key 'content'; add it"):
            await client.chat([HELLO[0], {"role": "user", "contnt": "hello"}])


async def test_text_that_is_no_unicode(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not valid UTF-8: character 6 is '\\ud800'"):
        await client.chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize(
    ("template", "arguments", "error", "part"),
    [
        (None, {}, FailedPreconditionError, "the model has no chat template"),
        ("{{ messages[0].content }}", {"tools": [TOOL]}, InvalidArgumentError, "tools has 1 of them, but the model's chat template knows none"),
        ("{{ raise_exception('no system') }}", {}, InvalidArgumentError, "refuses the messages: no system"),
        ("{{ messages[0].content }}", {"chat_template_kwargs": {"x": 1}}, InvalidArgumentError, "it reads no others"),
    ],
)
async def test_templates_that_can_not(
    socket_dir: Path, template: str | None, arguments: dict[str, Any], error: type[SpecwireError], part: str
) -> None:
    engine = ScriptedEngine(dataclasses.replace(make_spec(), chat_template=template))
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0]) as client:
        with pytest.raises(error) as failure:
            await client.chat(HELLO, **arguments)
    assert part in str(failure.value)


async def test_conversations_need_a_tokenizer(socket_dir: Path) -> None:
    async with serving(ScriptedEngine(), socket_dir) as server, AsyncClient(server.bound_addresses[0]) as client:
        with pytest.raises(UnsupportedError, match="the prompt is a conversation, but"):
            await client.chat(HELLO)
