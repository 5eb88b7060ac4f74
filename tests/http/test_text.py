"""Text is whole characters, the same streamed or not, and exactly what the tokens stand for."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specwire.http.token_text import TokenTexts
from tests.coordinator.byte_tokenizer import EOS, LONGER, make_tokenizer, token_bytes
from tests.http.serving import Served, http_served

# Bytes that make up emoji, CJK and ZWJ families, in no order: most of what they spell is no UTF-8, and all of it must survive.
PIECES = tuple("é€😀漢👩\u200d👧".encode())
LONG = tuple(range(EOS + 1, EOS + 1 + len(LONGER)))
WORDS = "👩‍👩‍👧‍👦 漢字かな €é😀🏳️‍🌈"


@pytest.fixture
async def served(socket_dir: Path) -> AsyncIterator[Served]:
    async with http_served(socket_dir, verifier={"alphabet": PIECES + LONG + tuple(b"ab")}) as served:
        yield served


@pytest.mark.parametrize("seed", range(6))
async def test_streamed_is_whole_is_decoded(served: Served, seed: int) -> None:
    body: dict[str, Any] = {"prompt": WORDS, "max_tokens": 60, "seed": seed, "return_token_ids": True, "logprobs": 1}
    whole = (await served.post("/v1/completions", body)).json
    (choice,) = whole["choices"]
    events = (await served.post("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})).events
    parts = [event["choices"][0] for event in events if event["choices"]]
    token_ids = [token_id for part in parts for token_id in part["token_ids"]]
    assert token_ids == choice["token_ids"] == served.verifier.target.generate(list(WORDS.encode()), 60, seed)
    assert "".join(part["text"] for part in parts) == choice["text"] == make_tokenizer().decode(token_ids)
    assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"] == list(WORDS.encode())
    # Usage, log-probabilities and delivered tokens agree.
    assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == 60
    assert sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"]) == 60
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(choice["text"])


@pytest.mark.parametrize("num_tokens", range(1, 12))
async def test_a_character_that_the_end_cuts(served: Served, num_tokens: int) -> None:
    """At whatever byte max_tokens ends it."""
    for seed in range(4):
        body = {"prompt": "a", "max_tokens": num_tokens, "seed": seed}
        text = (await served.post("/v1/completions", body)).json["choices"][0]["text"]
        assert text == make_tokenizer().decode(served.verifier.target.generate([97], num_tokens, seed))
        events = (await served.post("/v1/completions", body | {"stream": True})).events
        assert "".join(event["choices"][0]["text"] for event in events) == text


async def test_stop_text_of_several_bytes(served: Served) -> None:
    tokenizer = make_tokenizer()
    num_found = 0
    for seed in range(12):
        whole = tokenizer.decode(served.verifier.target.generate([97], 80, seed))
        for stop in ("b", "é", "a"):
            num_found += stop in whole
            body = {"prompt": "a", "max_tokens": 80, "seed": seed, "stop": stop}
            assert (await served.post("/v1/completions", body)).json["choices"][0]["text"] == whole.partition(stop)[0]
            events = (await served.post("/v1/completions", body | {"stream": True})).events
            assert "".join(event["choices"][0]["text"] for event in events) == whole.partition(stop)[0]
    assert num_found > 20


async def test_chat_logprobs_have_the_bytes(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 60, "seed": 1, "logprobs": True, "return_token_ids": True}
    (choice,) = (await served.post("/v1/chat/completions", body)).json["choices"]
    entries = choice["logprobs"]["content"]
    content = bytes(byte for entry in entries for byte in entry["bytes"])
    assert content == b"".join(map(token_bytes, choice["token_ids"]))
    assert content.decode(errors="replace") == choice["message"]["content"]


def test_single_tokens() -> None:
    texts = TokenTexts(make_tokenizer())
    for token_id in (*range(256), *LONG):
        assert texts.bytes_of(token_id) == token_bytes(token_id)
    assert texts.text_of(ord("a")) == "a"
    assert texts.text_of(0xF0) == r"bytes:\xf0"
    assert len({texts.text_of(token_id) for token_id in (*range(256), *LONG)}) == 256 + len(LONG)


async def test_tokenize_and_back(served: Served) -> None:
    answer = (await served.post("/tokenize", {"prompt": WORDS})).json
    assert answer["tokens"] == list(WORDS.encode())
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert (await served.post("/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": WORDS}
    chat = (await served.post("/tokenize", {"messages": [{"role": "user", "content": "é"}], "return_token_strs": True})).json
    assert bytes(chat["tokens"]).decode() == "<user>é<assistant>"
    assert chat["token_strs"][0] == "<"
    assert (await served.post("/tokenize", {"prompt": ""})).json["tokens"] == []
    assert (await served.post("/tokenize", {"prompt": "a" * 30_000})).json["count"] == 30_000
    assert (await served.post("/tokenize", {"prompt": "a", "messages": []})).status == 400
    assert (await served.post("/tokenize", {"prompt": "\ud800"})).status == 400
    assert (await served.post("/detokenize", {"tokens": [99_999]})).status == 400
