"""Messages as OpenAI's clients send them back, and refusals of what the chat template can't read: each names its parameter."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from specwire.http.values import read_messages
from tests.coordinator.byte_tokenizer import make_spec
from tests.http.serving import Served, http_served

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (USER, USER),
        (USER | {"name": None, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "user", "content": "a\nb"}),
        (USER | {"tool_calls": None, "refusal": None}, USER),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": "", "tool_calls": []}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "refusal": "no"}),
    ],
)
def test_what_templates_read(message: dict[str, Any], read: dict[str, Any]) -> None:
    assert read_messages([message]) == [read]


@pytest.mark.parametrize(
    ("sent", "read"),
    [('{"x": [1]}', {"x": [1]}), ("", {}), ({"x": 1}, {"x": 1}), ('{"x": ', '{"x": '), ("[1]", "[1]"), (3, 3), (None, {})],
)
def test_arguments_of_calls_are_objects(sent: Any, read: Any) -> None:
    """Templates write them with `tojson`: text would come out in quotes."""
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call(sent)]}])
    assert message["tool_calls"][0] == call(read)


def test_calls_that_are_none_are_the_templates_to_refuse() -> None:
    unusable: list[Any] = [[3], [{}], [{"function": 3}], [{"function": {"name": "f"}}], 3]
    for calls in unusable:
        assert read_messages([{"role": "assistant", "content": "", "tool_calls": calls}])[0]["tool_calls"] == calls


@pytest.fixture
async def plain(socket_dir: Path) -> AsyncIterator[Served]:
    """With a template that knows neither tools nor variables, and concatenates as many do."""
    template = "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    template += "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    async with http_served(socket_dir, verifier={"tokenizer": dataclasses.replace(make_spec(), chat_template=template)}) as served:
        yield served


async def test_an_answer_with_calls_is_sent_back(plain: Served) -> None:
    """As agents do it: the SDK's own object, dumped with all that is null in it."""
    answer = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}')]})
    messages: Any = [USER, answer.model_dump(), {"role": "tool", "tool_call_id": "1", "content": "b"}]
    text = (await plain.post("/tokenize", {"messages": messages})).json
    assert bytes(text["tokens"]).decode() == '<user>a<assistant>{"x": 1}<tool>b'
    said = await plain.openai.chat.completions.create(model="scripted", messages=messages, max_tokens=3)
    assert said.usage is not None
    assert said.usage.prompt_tokens == text["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}, "tools"),
        ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "refusal": "no"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [USER | {"content": None}]}, "messages"),
        ("/v1/chat/completions", {"messages": [USER], "allowed_token_ids": [5], "bad_words": ["\x05"]}, "allowed_token_ids"),
        ("/tokenize", {"messages": [USER], "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {"tokens": [99_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_refusals_name_the_parameter(plain: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = await plain.post(path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.json


async def test_values_are_shown_as_they_were_sent(plain: Served) -> None:
    answer = await plain.post("/v1/completions", {"prompt": "a", "stop": [""]})
    assert answer.json["error"]["message"].startswith("stop is [''], but must be a list of strings that are not empty")


async def test_a_variant_that_is_none_names_its_header(plain: Served) -> None:
    answer = await plain.post("/v1/completions", {"prompt": "a"}, x_specwire_variant="other")
    assert (answer.status, answer.json["error"]["param"]) == (400, "x-specwire-variant")


async def test_a_model_without_a_template(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"tokenizer": dataclasses.replace(make_spec(), chat_template=None)}) as served:
        with pytest.raises(openai.BadRequestError, match="the model has no chat template; send a prompt instead") as caught:
            await served.openai.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "a"}])
        assert caught.value.param == "messages"
