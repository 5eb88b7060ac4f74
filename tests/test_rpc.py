"""Options that channels and servers share."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from specwire import rpc, rpc_options
from specwire.errors import UnavailableError


def test_grpc_knows_every_option() -> None:
    """It ignores names that it does not know: a wrong one shows when streams that idle for a minute end with `too_many_pings`."""
    library = Path(cygrpc.__file__).read_bytes()
    options = [*rpc_options.channel_options(1), *rpc_options.server_options(1)]
    assert len(options) > 8
    for name, _ in options:
        assert name.encode() + b"\0" in library, f"gRPC knows no option {name!r}"


def test_a_server_allows_the_pings_that_clients_send() -> None:
    client, server = dict(rpc_options.channel_options(1)), dict(rpc_options.server_options(1))
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]


async def test_a_socket_in_a_folder_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    """gRPC's own complaint would name neither."""
    server = rpc.Server(["unix:missing/x.sock"], [], lambda _: None)
    with pytest.raises(UnavailableError, match=r"^cannot listen on unix:missing/x\.sock \(there is no folder missing\)"):
        await server.start()
    assert capfd.readouterr().err == ""


async def test_strangers_who_say_nothing_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a descriptor: gRPC by itself would wait for two minutes."""
    monkeypatch.setattr(rpc_options, "_HANDSHAKE_MS", 200)
    async with _serving() as address:
        port = int(address.rpartition(":")[2])
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for index, (_, writer) in enumerate(strangers):
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[:index])
        async with asyncio.timeout(30):
            for reader, writer in strangers:
                await _read_to_the_end(reader)
                writer.close()
        async with rpc.open_channel(address) as channel:
            assert await rpc.is_serving(channel, 10)


async def test_a_server_keeps_descriptors_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its connections it closes further ones at once, and takes others when some have gone."""
    monkeypatch.setattr(rpc, "connection_limit", lambda num_addresses: 3)
    async with _serving() as address, contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(rpc.open_channel(address)) for _ in range(3)]
        assert all([await rpc.is_serving(channel, 10) for channel in channels])
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        async with asyncio.timeout(30):
            assert await _read_to_the_end(reader) == b""
        writer.close()
        assert all([await rpc.is_serving(channel, 10) for channel in channels])
        await channels[0].close()
        async with asyncio.timeout(30), rpc.open_channel(address) as channel:
            await rpc.wait_serving(channel)


def test_connections_leave_files_for_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((1024, 768), (300, 150), (resource.RLIM_INFINITY, 2**31 - 1 - 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert rpc_options.connection_limit(1) == expected
        assert rpc_options.connection_limit(2) == expected // 2


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    server = rpc.Server(["127.0.0.1:0"], [], lambda _: None)
    await server.start()
    await server.set_serving(True)
    yield server.bound_addresses[0]
    await server.stop(0)


async def _read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    """What a peer sends before it hangs up."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
