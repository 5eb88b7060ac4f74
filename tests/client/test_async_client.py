"""The asynchronous client over real gRPC, against a scripted engine."""

import asyncio

import pytest

from specwire import AsyncClient, SamplingParams
from specwire.errors import (
    InvalidArgumentError,
    UnsupportedError,
)
from specwire.messages import ChoiceDelta, FinishReason, SpecStats, TokenOrigin, Usage
from tests.coordinator.byte_tokenizer import EOS, VOCAB_SIZE, ids_of
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.waiting import until

# --- what comes back ------------------------------------------------------------------------------------------------


async def test_generate_text(client: AsyncClient) -> None:
    result = await client.generate("so @", max_tokens=6)
    assert result.text == "ABCDEF"
    assert result.token_ids == ids_of("ABCDEF")
    assert result.prompt_token_ids == ids_of("so @")
    assert result.finish_reason == "length"
    assert result.usage == Usage(4, 0, 6)
    assert result.spec == SpecStats(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, accepted_per_position=(2, 1, 0))
    assert result.spec.acceptance_length == 2.5
    assert result.choices[0].origins == (TokenOrigin.ACCEPTED,) * 6
    assert result.choices[0].stop_cause is None


async def test_generate_ids_with_params_and_changes(client: AsyncClient, engine: ScriptedEngine) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.5)
    result = await client.generate(ids_of("@"), params, seed=0, request_id="label")
    assert result.text == "ABC"
    assert engine.requests[0].request.sampling == SamplingParams(max_tokens=3, temperature=0.5, seed=0)
    assert engine.requests[0].request.request_id == "label"


async def test_stream_text(client: AsyncClient) -> None:
    events = [event async for event in client.stream("@", max_tokens=10)]
    assert "".join(event.text for event in events) == "ABCDEFGHIJ"
    assert [token_id for event in events for token_id in event.token_ids] == ids_of("ABCDEFGHIJ")
    assert events[0].pieces == tuple("ABCDEFGHIJ"[: len(events[0].token_ids)])
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert events[-1].usage == Usage(1, 0, 10)
    assert events[-1].spec is not None
    assert all(event.origins == (TokenOrigin.ACCEPTED,) * len(event.token_ids) for event in events)


async def test_choices(client: AsyncClient) -> None:
    result = await client.generate("@", n=3, max_tokens=4)
    assert [choice.text for choice in result.choices] == ["ABCD", "BCDE", "CDEF"]
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="3 choices"):
        _ = result.text
    texts = ["", "", ""]
    async for event in client.stream("@", n=3, max_tokens=9):
        texts[event.index] += event.text
    assert texts == ["ABCDEFGHI", "BCDEFGHIJ", "CDEFGHIJK"]


async def test_logprobs(client: AsyncClient) -> None:
    result = await client.generate("@", max_tokens=5, logprobs=2)
    logprobs = result.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 5
    assert [token_id for token_id, _ in logprobs[0].top] == [0, 1]
    result = await client.generate("@", max_tokens=5, logprobs=0)
    assert [entry.top for entry in result.choices[0].logprobs or ()] == [[]] * 5
    assert (await client.generate("@", max_tokens=5)).choices[0].logprobs is None


async def test_stop_strings_use_the_servers_text(client: AsyncClient) -> None:
    result = await client.generate("@", stop="GH")
    assert (result.text, result.finish_reason, result.choices[0].stop_cause) == ("ABCDEF", "stop", "GH")
    assert result.token_ids == ids_of("ABCDEFGH")
    events = [event async for event in client.stream("@", stop=["GH"], include_stop_str_in_output=True)]
    assert "".join(event.text for event in events) == "ABCDEFGH"


async def test_text_of_eos_and_stop_ids_is_left_out(client: AsyncClient) -> None:
    result = await client.generate("@", stop_token_ids=[ord("D")])
    assert (result.text, result.token_ids, result.choices[0].stop_cause) == ("ABC", ids_of("ABCD"), ord("D"))
    events = [event async for event in client.stream("@", stop_token_ids=[ord("D")])]
    assert "".join(event.text for event in events) == "ABC"
    assert events[-1].pieces == ("A", "B", "C", "")
    result = await client.generate([EOS - 3])  # the bytes 254 and 255, then EOS
    assert (result.token_ids, result.choices[0].stop_cause, result.text) == ([EOS - 2, EOS - 1, EOS], EOS, "\ufffd\ufffd")


async def test_text_never_holds_part_of_a_character(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.is_paused = True
    stream = client.stream("x")
    reading = asyncio.create_task(anext(stream))
    await until(lambda: bool(engine.live))
    sink = engine.live[0].sink
    pieces = []
    for token_id in "aé😀".encode()[:-1]:
        sink.delta(0, [token_id], b"\x01")
        pieces.append((await reading).text)
        reading = asyncio.create_task(anext(stream))
    sink.choice(ChoiceDelta(0, [], b"", finish_reason=FinishReason.LENGTH, usage=Usage(1, 0, 6), spec_stats=SpecStats()))
    assert pieces == ["a", "", "é", "", "", ""]
    last = await reading
    assert (last.text, last.token_ids, last.pieces) == ("\ufffd", [], ("\ufffd",))
    engine.live.clear()


async def test_explicit_zeros_arrive_as_zeros(client: AsyncClient, engine: ScriptedEngine) -> None:
    zeros = {"temperature": 0, "seed": 0, "logprobs": 0, "min_tokens": 0, "top_k": 0, "max_draft_tokens": 0}
    await client.generate("@", max_tokens=1, **zeros)
    await client.generate("@", SamplingParams(max_tokens=1, **zeros))
    await client.generate("@", max_tokens=1)
    for scripted in engine.requests[:2]:
        assert {name: getattr(scripted.request.sampling, name) for name in zeros} == zeros
    unset = engine.requests[2].request.sampling
    assert (unset.seed, unset.logprobs, unset.max_draft_tokens) == (None, None, None)


async def test_max_tokens_none_travels(client: AsyncClient, engine: ScriptedEngine) -> None:
    await client.generate("@", max_tokens=None, stop_token_ids=[ord("D")])
    assert engine.requests[0].request.sampling.max_tokens is None


# --- without a tokenizer --------------------------------------------------------------------------------------------


async def test_ids_work_without_a_tokenizer(ids_client: AsyncClient) -> None:
    result = await ids_client.generate([5, 0], max_tokens=4)
    assert result.token_ids == [1, 2, 3, 4]
    with pytest.raises(UnsupportedError, match="only token_ids"):
        _ = result.text
    event = await anext(ids_client.stream([5, 0], max_tokens=4))
    with pytest.raises(UnsupportedError, match="only token_ids"):
        _ = event.text


async def test_text_needs_a_tokenizer(ids_client: AsyncClient) -> None:
    with pytest.raises(UnsupportedError, match="the prompt is text, but"):
        await ids_client.generate("hello")
    with pytest.raises(UnsupportedError, match="send token ids"):
        await ids_client.get_tokenizer()


async def test_the_tokenizer_is_fetched_once(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from specwire.client import connection

    calls, fetch = [], connection.fetch_tokenizer

    async def counting(*arguments: object) -> object:
        calls.append(arguments)
        return await fetch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(connection, "fetch_tokenizer", counting)
    await asyncio.gather(*(client.generate("@", max_tokens=2) for _ in range(10)))
    tokenizer = await client.get_tokenizer()
    assert len(calls) == 1
    assert (tokenizer.vocab_size, tokenizer.encode("é")) == (VOCAB_SIZE, ids_of("é"))
