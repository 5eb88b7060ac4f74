"""A drafter that is about to stop: says so on every stream, answers what it owes, waits for all to leave."""

import asyncio
from pathlib import Path

import grpc
import pytest

from specwire.messages import DraftRow, RowStatus
from specwire.rpc import is_serving, open_channel
from tests.waiting import until

from .helpers import DraftClient, describe, draft_stream, open_request, serve_drafter


async def test_all_streams_are_told_and_answered_until_they_leave(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir) as server:
        address = server.addresses[0]
        async with draft_stream(address, lane=3) as first, draft_stream(address, lane=4) as second, open_channel(address) as channel:
            await first.ask(opens=[open_request([1, 2, 1, 2, 1])], rows=[DraftRow(0, 1, 5, 1)])
            draining = asyncio.create_task(server.drain(30.0))
            for client, lane in ((first, 3), (second, 4)):
                notice = await client.receive()
                assert (notice.draining, notice.lane, notice.round, notice.rows) == (True, lane, 0, [])
            assert not await is_serving(channel)
            answer = await first.ask(rows=[DraftRow(0, 1, 5, 1, 1)])
            assert [row.status for row in answer.rows] == [RowStatus.OK]
            for refused in (describe(address), DraftClient(channel).receive()):
                with pytest.raises(grpc.aio.AioRpcError, match="about to stop") as failure:
                    await refused
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            first.cancel()
            assert not draining.done()
            second.cancel()
            async with asyncio.timeout(10):
                await draining
        await until(lambda: server.worker.pool.num_free == 64)


async def test_nobody_is_waited_for(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir) as server, asyncio.timeout(10):
        await server.drain(3600.0)


async def test_a_coordinator_that_stays_is_waited_for_no_longer_than_the_grace(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve_drafter(socket_dir) as server, draft_stream(server.addresses[0]) as client:
        await client.ask(opens=[open_request([1, 2, 1])], rows=[DraftRow(0, 1, 3, 1)])  # so that the drafter has seen the stream
        await server.drain(0.05)
        assert "has not left within 0.05 s" in caplog.text
        assert (await client.receive()).draining
