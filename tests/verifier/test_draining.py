"""A verifier that is about to stop: says so, answers what it owes, waits for its coordinator to leave."""

import asyncio

import grpc

from specwire.rpc import is_serving
from tests.verifier.harness import PROMPT, LaunchGate, Rounds, decode, ends_with, make_verifier, open_message, prefill, serve
from tests.waiting import until


async def test_a_coordinator_is_told_and_answered_until_it_leaves(model, socket_dir, truth):
    async with serve(make_verifier(model), socket_dir) as served:
        gate = LaunchGate(served.verifier)
        rounds, stream = Rounds(served.verifier), served.stream()
        await stream.start()
        await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
        await until(lambda: gate.num_launched == 1)
        draining = asyncio.create_task(served.server.drain(30.0))
        await until(lambda: not served.server._gate._is_open)
        assert not await is_serving(served.channel)
        gate.open()
        first = await stream.receive()
        assert first.rows[0].token_ids == truth[:1]
        notice = await stream.receive()
        assert (notice.draining, notice.session, notice.lane, notice.round, notice.rows) == (True, first.session, first.lane, 0, [])
        # A round that was under way when it said so is answered; nobody else gets in.
        crossing = await stream.round_trip(rounds.build([decode(0, PROMPT + truth[:1])]))
        assert crossing.rows[0].token_ids == truth[1:2]
        other = served.stream("c", incarnation=2)
        await other.send(rounds.build())
        await ends_with(other, grpc.StatusCode.UNAVAILABLE, "the verifier is stopping")
        assert not draining.done()
        stream.cancel()
        async with asyncio.timeout(10):
            await draining
        await until(lambda: served.verifier.num_open_slots == 0)


async def test_nobody_is_waited_for(model, socket_dir):
    async with serve(make_verifier(model), socket_dir) as served:
        async with asyncio.timeout(10):
            await served.server.drain(3600.0)


async def test_a_coordinator_that_stays_is_waited_for_no_longer_than_the_grace(model, socket_dir, caplog):
    async with serve(make_verifier(model), socket_dir) as served:
        stream = served.stream()
        await stream.start()
        await served.server.drain(0.05)
        assert "has not left within 0.05 s" in caplog.text
        assert (await stream.receive()).draining
        stopping = asyncio.create_task(served.server.stop(5.0))
        await ends_with(stream, grpc.StatusCode.UNAVAILABLE)  # a connection that closes at once may hide the words
        assert await stopping
