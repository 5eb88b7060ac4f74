"""What large requests take: bounded while they are there, and nothing once they are answered."""

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specwire.http.encoding import MAX_TEXT
from specwire.http.failures import Refusal
from specwire.http.fields import Fields
from specwire.http.memory import LARGE_BYTES, BodyMemory
from specwire.http.requests import SamplingFields
from specwire.http.service import MAX_CONTAINERS
from tests.http.serving import Answer, Served, http_served
from tests.waiting import until

LONG = 5_000
"""Tokens of a prompt that is too long."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed because nothing holds it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def post(served: Served, path: str, body: object) -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await served.call("POST", path, content, content_type="application/json")


async def gone(kind: type[object]) -> None:
    """Objects of this kind are, once what still runs has returned."""
    for _ in range(100):
        # Not isinstance, which asks an object for its class: some of other packages warn then.
        if not any(issubclass(type(each), kind) for each in gc.get_objects()):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{kind.__name__} of requests that have ended are still there")


def _error(answer: Answer) -> dict[str, Any]:
    error: dict[str, Any] = answer.json["error"]
    return error


@pytest.mark.usefixtures("no_collector")
async def test_refused_requests_are_freed_at_once(socket_dir: Path) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [97] * LONG}),
        ("/v1/completions", {"prompt": [97] * LONG, "stream": True}),
        ("/v1/completions", {"prompt": "a" * LONG}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"9999": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * LONG}]}),
        ("/detokenize", {"tokens": [99_999]}),
    ]
    async with http_served(socket_dir) as served:
        for path, body in requests:
            assert (await post(served, path, body)).status == 400
            await served.until_idle()
        await gone(Fields)


@pytest.mark.usefixtures("no_collector")
async def test_a_failed_stream_is_freed_at_once(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.02}) as served:
        asking = asyncio.create_task(post(served, "/v1/completions", {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}))
        await until(lambda: bool(served.verifier.session and served.verifier.session.slots))
        await asyncio.sleep(0.1)  # a few events
        served.service.lifetime._stop.set()  # as at the end of a grace period
        events = (await asking).events
        assert "error" in events[-1]
        await gone(SamplingFields)


async def test_a_text_that_is_far_too_long_is_not_read_whole(socket_dir: Path) -> None:
    async with http_served(socket_dir) as served:
        for text in ("a" * 20_000, "a " * 10_000):  # 512 tokens at most, of a byte each
            error = _error(await post(served, "/v1/completions", {"prompt": text}))
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert "8192 tokens in the first 8192 of its 20000 characters" in error["message"]
        error = _error(await post(served, "/v1/completions", {"prompt": "a" * 40_000}))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        error = _error(await post(served, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 20_000}]}))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        error = _error(await post(served, "/tokenize", {"prompt": "a" * (MAX_TEXT + 1)}))
        assert error["param"] == "prompt"


async def test_more_lists_than_any_request_has(socket_dir: Path) -> None:
    async with http_served(socket_dir) as served:
        for value in ([], {}):
            error = _error(await post(served, "/v1/completions", {"prompt": [value] * (MAX_CONTAINERS + 1)}))
            assert error["code"] == "request_too_large"
            assert f"may have {MAX_CONTAINERS}" in error["message"]
        # Those inside texts are none, however the text goes on.
        text = '[{"\\' * (MAX_CONTAINERS // 2)
        answer = await post(served, "/tokenize", {"prompt": text})
        assert (answer.status, answer.json["count"]) == (200, len(text))


async def test_no_more_biases_than_a_vocabulary_has(socket_dir: Path) -> None:
    async with http_served(socket_dir) as served:
        biases = {str(token_id): 1 for token_id in range(300_001)}
        error = _error(await post(served, "/v1/completions", {"prompt": "a", "logit_bias": biases}))
    assert error["param"] == "logit_bias"
    assert "may have 300000" in error["message"]


async def test_all_large_bodies_together_are_bounded() -> None:
    memory = BodyMemory(LARGE_BYTES)
    memory.grow(0, LARGE_BYTES - 1)
    assert memory.num_bytes == 0
    for _ in range(16):
        memory.grow(0, 1)
        memory.grow(1, LARGE_BYTES)
    assert memory.num_bytes == 16 * LARGE_BYTES
    with pytest.raises(Refusal, match=r"may have 16777216; send it again later") as refused:
        memory.grow(LARGE_BYTES - 1, LARGE_BYTES)
    assert (refused.value.status, refused.value.retry_after_ms) == (429, 1000)
    memory.release(LARGE_BYTES - 1)  # what it had
    memory.release(LARGE_BYTES)
    memory.grow(LARGE_BYTES - 1, LARGE_BYTES)
    for _ in range(16):
        memory.release(LARGE_BYTES)
    assert memory.num_bytes == 0


async def test_bodies_that_wait_leave_no_room_for_others(socket_dir: Path) -> None:
    """Sixteen that have not ended hold nearly all that there is, until they are gone."""
    megabyte = 1 << 20
    async with http_served(socket_dir, http={"max_body_mb": 2}) as served:
        head = f"POST /tokenize HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {2 * megabyte}\r\n\r\n".encode()
        writers = []
        for _ in range(16):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head + bytes(2 * megabyte - 1024))
            await writer.drain()
            writers.append(writer)
        body = b'{"prompt": "a"' + b" " * megabyte + b"}"
        async with asyncio.timeout(10):  # the last of them may not be read yet
            answer = await post(served, "/tokenize", body)
            while answer.status == 200:
                answer = await post(served, "/tokenize", body)
        assert (answer.status, _error(answer)["code"], answer.headers["retry-after"]) == (429, "overloaded", "1")
        assert (await post(served, "/tokenize", {"prompt": "a"})).status == 200
        for writer in writers:
            writer.close()
        await until(lambda: served.service.lifetime.num_running == 0)
        assert (await post(served, "/tokenize", body)).status == 200


def test_freed_memory_goes_back_to_the_system() -> None:
    """In a process of its own: most of what is between objects that stay."""
    program = """
from pathlib import Path
from specwire.http.memory import give_back
def mib(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
objects = [bytes(2000 + index % 64) for index in range(50_000)]
kept = objects[::100]
del objects
before = mib()
give_back()
print(before - mib())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert float(ran.stdout) > 50
