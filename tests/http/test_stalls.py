"""Clients that send requests and never read, or never send all of them: others don't notice, memory is bounded, and they are cut off."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import pytest

from specwire.http.metrics import STALLED_CLIENTS
from tests.http.serving import Served, http_served, request
from tests.waiting import until

NUM_STALLED = 8
LARGE = {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "n": 2, "logprobs": 5, "return_token_ids": True}
"""300 KB: more than what waits of an answer."""
SEND_BUFFER = 8192


async def _stall(served: Served, body: dict[str, object]) -> socket.socket:
    """Sends a request; nothing is read."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(own, ("127.0.0.1", served.port))
    await loop.sock_sendall(own, request("POST", "/v1/completions", json.dumps(body).encode(), content_type="application/json"))
    return own


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_clients_that_never_read_are_cut_off(socket_dir: Path, is_streamed: bool) -> None:
    serving = http_served(socket_dir, send_buffer=SEND_BUFFER, http={"client_stall_s": 0.5})
    async with serving as served, contextlib.AsyncExitStack() as clients:
        board = served.service.board
        for _ in range(NUM_STALLED):
            clients.enter_context(await _stall(served, LARGE | {"stream": is_streamed}))
        params = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "seed": 3, "stream": True}
        texts = set()
        async with asyncio.timeout(60):
            while board.own(STALLED_CLIENTS) < NUM_STALLED:  # others are served all the while
                events = (await served.post("/v1/completions", params)).events
                texts.add("".join(event["choices"][0]["text"] for event in events if event["choices"]))
        assert texts == {bytes(served.verifier.target.generate([97], 100, 3)).decode()}
        await served.until_idle()
        assert board.own(STALLED_CLIENTS) == NUM_STALLED


async def test_who_reads_slowly_is_not_cut_off(socket_dir: Path) -> None:
    """Longer than client_stall_s in all, but something again and again."""
    async with http_served(socket_dir, send_buffer=SEND_BUFFER, http={"client_stall_s": 5.0}) as served:
        whole = await served.post("/v1/completions", LARGE | {"seed": 1})
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 16)
        writer.write(request("POST", "/v1/completions", json.dumps(LARGE | {"seed": 1}).encode(), content_type="application/json"))
        size, parts = len(whole.body) // 8, []
        while part := await reader.read(size):
            parts.append(part)
            await asyncio.sleep(0.01)
        assert b"".join(parts).endswith(whole.body[-100:])
        assert served.service.board.own(STALLED_CLIENTS) == 0
        writer.close()


async def test_a_client_that_goes_while_it_is_waited_for(socket_dir: Path) -> None:
    async with http_served(socket_dir, send_buffer=SEND_BUFFER, http={"client_stall_s": 60.0}) as served:
        client = await _stall(served, LARGE | {"stream": True})
        await until(lambda: served.service.lifetime.num_running == 1)
        await asyncio.sleep(0.3)
        client.close()
        await served.until_idle()
        assert served.service.board.own(STALLED_CLIENTS) == 0


KEPT = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
"""After its answer the connection stays."""


@pytest.mark.parametrize("sent", [b"", KEPT[:9], KEPT[:-2], b"\r\n"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_who_does_not_say_what_it_wants_is_cut_off(socket_dir: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, *, is_first: bool) -> None:
    """Also behind a request that was answered; but who says nothing there is only idle, which may take longer."""
    monkeypatch.setattr("specwire.http.connection._HEADERS_S", 0.2)
    async with http_served(socket_dir) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        with contextlib.closing(writer):
            async with asyncio.timeout(30):
                if not is_first:
                    writer.write(KEPT)
                    await reader.readuntil(b"HTTP/1.1 200")
                writer.write(sent)
                if sent or is_first:
                    with contextlib.suppress(ConnectionResetError):
                        await reader.read()
                else:
                    await asyncio.sleep(0.5)
                    writer.write(KEPT)
                    await reader.readuntil(b"HTTP/1.1 200")


BODY = json.dumps({"prompt": "a", "max_tokens": 3}).encode()


@pytest.mark.parametrize("sent", [0, 10, len(BODY) - 1])
async def test_who_does_not_send_all_of_a_body_is_cut_off(socket_dir: Path, sent: int) -> None:
    async with http_served(socket_dir, http={"client_stall_s": 0.3}) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        with contextlib.closing(writer):
            writer.write(request("POST", "/v1/completions", BODY, content_type="application/json")[: -len(BODY)] + BODY[:sent])
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        await served.until_idle()
        assert served.service.board.own(STALLED_CLIENTS) == 1


async def test_who_sends_slowly_is_not_cut_off(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor whose request lies behind one that is being answered, however long that takes."""
    async with http_served(socket_dir, http={"client_stall_s": 0.5}, verifier={"delay_s": 0.02}) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        with contextlib.closing(writer):
            head = request("POST", "/v1/completions", BODY, content_type="application/json")[: -len(BODY)]
            for part in (head, *(BODY[i : i + 4] for i in range(0, len(BODY), 4))):
                writer.write(part)
                await asyncio.sleep(0.1)
            assert b"200 OK" in await reader.read()
        long = json.dumps({"prompt": "a", "max_tokens": 100, "ignore_eos": True, "max_draft_tokens": 0}).encode()
        first = request("POST", "/v1/completions", long, content_type="application/json").replace(b"connection: close\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        with contextlib.closing(writer):
            writer.write(first + head)
            await reader.readuntil(b"200 OK")
            writer.write(BODY)
            assert (await reader.read()).count(b"200 OK") == 1
        assert served.service.board.own(STALLED_CLIENTS) == 0


async def test_who_asks_before_it_sends_too_much_is_told_at_once(socket_dir: Path) -> None:
    async with http_served(socket_dir, http={"max_body_mb": 1}) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        with contextlib.closing(writer):
            head = request("POST", "/v1/completions", content_type="application/json", expect="100-continue")
            writer.write(head.replace(b"content-length: 0", b"content-length: 99999999999"))
            async with asyncio.timeout(30):
                answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"the body has 99999999999 bytes or more, but may have 1048576; send less" in answer
