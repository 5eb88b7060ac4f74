"""Clients that hang up, at any moment: soon nothing of their requests is active anywhere."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specwire.http.metrics import DISCONNECTS, REQUESTS
from tests.http.serving import Served, http_served, request
from tests.waiting import until

PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
PHASES = ("before the request", "in the head", "in the body", "at submit", "soon", "in the stream")
FORMS: tuple[dict[str, Any], ...] = ({}, {"stream": True}, {"stream": True, "n": 3}, {"n": 3}, {"stream": True, "stop": "never said"})


@pytest.fixture
async def served(socket_dir: Path) -> AsyncIterator[Served]:
    async with http_served(socket_dir, verifier={"delay_s": 0.002}) as served:
        yield served


async def hang_up(served: Served, phase: str, form: dict[str, Any], path: str, pause_s: float = 0.0, how: str = "close") -> None:
    """Sends a request for hundreds of tokens as far as the phase says, and leaves."""
    body = {**PATHS[path], "max_tokens": 400, "ignore_eos": True, **form}
    content = request("POST", path, json.dumps(body).encode(), content_type="application/json")
    head_end = content.index(b"\r\n\r\n") + 4
    size = {"before the request": 0, "in the head": head_end // 2, "in the body": head_end + 5}.get(phase, len(content))
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        writer.write(content[:size])
        await writer.drain()
        if phase == "soon":
            await asyncio.sleep(pause_s)
        if phase == "in the stream":
            if form.get("stream"):
                await reader.readuntil(b"data: ")
            else:
                await until(lambda: bool(served.engine._requests))
    finally:
        if how == "abort":
            writer.transport.abort()
        writer.close()


@pytest.mark.parametrize("phase", PHASES)
async def test_disconnect(served: Served, phase: str) -> None:
    for form, path in itertools.product(FORMS, PATHS):
        await hang_up(served, phase, form, path)
    await served.until_idle()
    assert served.service.board.own(REQUESTS, ("completions", "500")) == 0
    # The service is as good as new.
    answer = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
    assert answer.json["usage"]["completion_tokens"] == 5
    await served.until_idle()


async def test_disconnects_are_counted_by_phase(served: Served) -> None:
    board = served.service.board
    await hang_up(served, "in the stream", {}, "/v1/completions")
    await until(lambda: board.own(DISCONNECTS, ("waiting",)) == 1)
    await hang_up(served, "in the stream", {"stream": True}, "/v1/completions")
    await until(lambda: board.own(DISCONNECTS, ("streaming",)) == 1)
    await served.until_idle()
    assert board.own(REQUESTS, ("completions", "499")) == 1
    assert board.own(REQUESTS, ("completions", "200")) == 1


async def test_one_that_waits_in_the_queue(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.002}, coordinator={"max_num_seqs": 1}) as served:
        first = asyncio.create_task(served.post("/v1/completions", {"prompt": "a", "max_tokens": 200, "ignore_eos": True}))
        await until(lambda: len(served.engine._requests) == 1)
        for form in FORMS:
            await hang_up(served, "at submit", form, "/v1/completions")
        await until(lambda: len(served.engine._requests) == 1 and served.service.lifetime.num_running == 1)
        assert (await first).json["usage"]["completion_tokens"] == 200
        await served.until_idle()


async def test_a_reader_that_stops_reading(served: Served) -> None:
    """It keeps its connection: the rest waits for it, and it gets all of it."""
    content = request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 400, "stream": True, "seed": 1}).encode(),
                      content_type="application/json")  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 8)
    writer.write(content)
    await until(lambda: served.service.lifetime.num_running == 1)
    await until(lambda: not served.engine._requests)
    received = await reader.read(-1)
    assert received.count(b'"finish_reason":"length"') == 1
    assert b"[DONE]" in received
    writer.close()
    await served.until_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_500_disconnects(served: Served) -> None:
    """A storm of them beside clients that stay: within a second nothing is active, and whoever stayed has everything."""
    rng = random.Random(7)
    staying = [
        asyncio.create_task(served.post("/v1/completions", {"prompt": "b", "max_tokens": 300, "ignore_eos": True, "seed": i})) for i in range(4)
    ]
    cases = [
        (rng.choice(PHASES), rng.choice(FORMS), rng.choice(list(PATHS)), rng.random() * 0.05, rng.choice(["close", "abort"])) for _ in range(500)
    ]
    for start in range(0, len(cases), 20):
        await asyncio.gather(*(hang_up(served, *case) for case in cases[start : start + 20]))
    for i, answer in enumerate(await asyncio.gather(*staying)):
        assert answer.json["choices"][0]["text"] == bytes(served.verifier.target.generate([98], 300, i)).decode()
    await served.until_idle(1.0)
