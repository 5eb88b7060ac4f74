"""OpenAI's own client against the service: what it sends is understood, and what comes back is what it expects."""

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from tests.coordinator.byte_tokenizer import ids_of
from tests.http.serving import Served

MODEL = "scripted"
MESSAGES: Any = [{"role": "user", "content": "abc"}]
CHAT_PROMPT = "<user>abc<assistant>"


def expected(served: Served, prompt: str, num_tokens: int, seed: int, choice: int = 0) -> str:
    """What the target alone says."""
    return bytes(served.verifier.target.generate(ids_of(prompt), num_tokens, seed, choice)).decode()


async def test_completion(served: Served) -> None:
    answer = await served.openai.completions.create(model=MODEL, prompt="once", max_tokens=20, seed=1)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (expected(served, "once", 20, 1), "length", 0, None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 20, 24)


async def test_completions_have_sixteen_tokens_by_default(served: Served) -> None:
    answer = await served.openai.completions.create(model=MODEL, prompt="once")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_chat(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=20, seed=1)
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content, message.refusal) == ("assistant", expected(served, CHAT_PROMPT, 20, 1), None)
    assert not message.tool_calls
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(CHAT_PROMPT)


async def test_what_the_template_gets(served: Served) -> None:
    tool: Any = {"type": "function", "function": {"name": "f"}}
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    create = served.openai.chat.completions.create
    seeded: Any = {"model": MODEL, "seed": 2, "max_tokens": 12}
    with_tools = await create(messages=parts, tools=[tool], extra_body={"chat_template_kwargs": {"enable_thinking": True}}, **seeded)
    prompt = '<user>a\nb[{"type": "function", "function": {"name": "f"}}]<assistant><think>'
    assert with_tools.choices[0].message.content == expected(served, prompt, 12, 2)
    without = await create(messages=parts, tools=[tool], tool_choice="none", **seeded)
    assert without.choices[0].message.content == expected(served, "<user>a\nb<assistant>", 12, 2)


async def test_chat_stream(served: Served) -> None:
    stream = await served.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, seed=3, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *parts, last = chunks
    for index in range(2):
        choices = [chunk.choices[0] for chunk in parts if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert "".join(choice.delta.content or "" for choice in choices) == expected(served, CHAT_PROMPT, 30, 3, index)
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
        assert choices[-1].finish_reason
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(CHAT_PROMPT), 60)


async def test_counts_of_every_event(served: Served) -> None:
    """As load generators ask for them: each event has its own choice's, the last one those of all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await served.openai.completions.create(model=MODEL, prompt=["ab", "c"], max_tokens=20, seed=3, stream=True, stream_options=options)  # type: ignore[call-overload]
    *parts, last = [chunk async for chunk in stream]
    for index, num_prompt in enumerate((2, 1)):
        usages = [chunk.usage for chunk in parts if chunk.choices[0].index == index]
        counts = [usage.completion_tokens for usage in usages]
        assert {usage.prompt_tokens for usage in usages} == {num_prompt}
        assert counts == sorted(counts)
        assert (counts[0] > 0, counts[-1], usages[-1].total_tokens) == (True, 20, 20 + num_prompt)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 40)


async def test_completion_stream_without_usage(served: Served) -> None:
    chunks = [chunk async for chunk in await served.openai.completions.create(model=MODEL, prompt="a", max_tokens=9, seed=3, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(served, "a", 9, 3)
    assert "usage" not in chunks[-1].model_fields_set


@pytest.mark.parametrize("prompts", [["ab", "c"], [[97, 98], [99]]])
async def test_several_prompts(served: Served, prompts: Any) -> None:
    create = served.openai.completions.create
    answer = await create(model=MODEL, prompt=prompts, max_tokens=8, seed=4, n=2)
    texts = [expected(served, prompt, 8, 4, choice) for prompt in ("ab", "c") for choice in range(2)]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 32)
    streamed: dict[int, str] = dict.fromkeys(range(4), "")
    num_ends = 0
    async for chunk in await create(model=MODEL, prompt=prompts, max_tokens=8, seed=4, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
        num_ends += chunk.choices[0].finish_reason is not None
    assert list(streamed.values()) == texts
    assert num_ends == 4


async def test_prompt_of_token_ids(served: Served) -> None:
    answer = await served.openai.completions.create(model=MODEL, prompt=[97, 98], max_tokens=8, seed=4)
    assert answer.choices[0].text == expected(served, "ab", 8, 4)


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo(served: Served, prompt: Any) -> None:
    create = served.openai.completions.create
    text = "ab" + expected(served, "ab", 8, 4)
    assert (await create(model=MODEL, prompt=prompt, max_tokens=8, seed=4, echo=True)).choices[0].text == text
    chunks = [chunk async for chunk in await create(model=MODEL, prompt=prompt, max_tokens=8, seed=4, echo=True, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[0].choices[0].text == "ab"


async def test_seeds(served: Served) -> None:
    async def text(seed: int | None) -> str:
        return (await served.openai.completions.create(model=MODEL, prompt="a", max_tokens=24, seed=seed)).choices[0].text

    assert await text(-5) == await text(-5) == await text(2**64 - 5)
    assert await text(None) != await text(None)


@pytest.mark.parametrize("stop", ["z", ["zz?", "z"]])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stop_texts(served: Served, stop: Any, is_streamed: bool) -> None:
    whole = expected(served, "a", 200, 9)
    assert "z" in whole
    sent: Any = {"model": MODEL, "prompt": "a", "max_tokens": 200, "seed": 9, "stop": stop}
    if is_streamed:
        choices = [chunk.choices[0] async for chunk in await served.openai.completions.create(**sent, stream=True)]
    else:
        choices = (await served.openai.completions.create(**sent)).choices
    assert "".join(choice.text for choice in choices) == whole.partition("z")[0]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == "z"  # type: ignore[attr-defined]


async def test_stop_texts_across_tokens(served: Served) -> None:
    """Inside of an accepted block, and across steps: whatever the steps were, the text is cut at the same place."""
    whole = expected(served, "a", 100, 11)
    for start in range(20, 60, 7):
        stop = whole[start : start + 5]
        answer = await served.openai.completions.create(model=MODEL, prompt="a", max_tokens=100, seed=11, stop=stop)
        assert answer.choices[0].text == whole.partition(stop)[0]
        kept = await served.openai.completions.create(
            model=MODEL, prompt="a", max_tokens=100, seed=11, stop=stop, extra_body={"include_stop_str_in_output": True}
        )
        assert kept.choices[0].text == whole.partition(stop)[0] + stop


async def test_stop_token_ids(served: Served) -> None:
    whole = expected(served, "a", 200, 9)
    answer = await served.openai.completions.create(model=MODEL, prompt="a", max_tokens=200, seed=9, extra_body={"stop_token_ids": [ord("z")]})
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (whole.partition("z")[0], "stop", ord("z"))  # type: ignore[attr-defined]


async def test_chat_logprobs(served: Served) -> None:
    sent: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 1, "logprobs": True, "top_logprobs": 3}
    answer = await served.openai.chat.completions.create(**sent)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    entries = logprobs.content or []
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 12
    assert all(entry.logprob <= 0 for entry in entries)
    streamed: list[Any] = []
    async for chunk in await served.openai.chat.completions.create(**sent, stream=True):
        part = chunk.choices[0].logprobs
        streamed += (part.content or []) if part else []
    assert streamed == entries


async def test_completion_logprobs(served: Served) -> None:
    sent: Any = {"model": MODEL, "prompt": "a", "max_tokens": 12, "seed": 1, "logprobs": 2}
    answer = await served.openai.completions.create(**sent)
    whole = answer.choices[0].logprobs
    assert whole is not None
    assert "".join(whole.tokens or []) == answer.choices[0].text
    assert whole.text_offset == list(range(12))
    assert [len(top) for top in whole.top_logprobs or []] == [2] * 12
    parts = [chunk.choices[0].logprobs async for chunk in await served.openai.completions.create(**sent, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts if part for value in getattr(part, name)] == getattr(whole, name)


async def test_no_alternatives(served: Served) -> None:
    answer = await served.openai.completions.create(model=MODEL, prompt="a", max_tokens=4, logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs == [{}] * 4
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 4


async def test_models(served: Served) -> None:
    (model,) = (await served.openai.models.list()).data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "specwire")
    assert (await served.openai.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await served.openai.models.retrieve("other/model")


def raised(error: type[openai.APIStatusError], param: str | None) -> Any:
    return pytest.raises(error, check=lambda caught: caught.body["param"] == param)  # type: ignore[index]


async def test_errors(served: Served) -> None:
    complete, chat = served.openai.completions.create, served.openai.chat.completions.create
    with raised(openai.NotFoundError, "model"):
        await complete(model="gpt-4", prompt="a")
    with raised(openai.BadRequestError, "temperature"):
        await complete(model=MODEL, prompt="a", temperature=-1)
    with raised(openai.BadRequestError, "top_logprobs"):
        await chat(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=21)
    with raised(openai.BadRequestError, "max_completion_tokens"):
        await chat(model=MODEL, messages=MESSAGES, max_completion_tokens=0)
    with raised(openai.BadRequestError, "response_format"):
        await chat(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"})
    with raised(openai.BadRequestError, "n"):
        async for _ in await chat(model=MODEL, messages=MESSAGES, n=0, stream=True):
            raise AssertionError("nothing must come")
    too_long: Sequence[int] = [97] * 600
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(model=MODEL, prompt=list(too_long))
    assert caught.value.code == "context_length_exceeded"
    await served.until_idle()
