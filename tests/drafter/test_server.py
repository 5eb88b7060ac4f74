"""The drafter over real gRPC on a Unix socket."""

import asyncio
import random
import time
from pathlib import Path

import grpc
import pytest

from drafter_svc.method import Method, build_method
from drafter_svc.server import MAX_OUTSTANDING_ROUNDS, DrafterServer
from specwire.config import DrafterConfig
from specwire.errors import InternalError, InvalidArgumentError, UnsupportedError
from specwire.messages import DraftCommit, DraftRound, DraftRow, RowStatus, SlotRef
from specwire.rpc import is_serving, open_channel
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import drafter_pb2 as pb
from specwire.v1 import drafter_pb2_grpc as pb_grpc
from tests.drafter.helpers import DraftClient, ScriptedMethod, describe, draft_stream, open_request, serve_drafter

pytestmark = pytest.mark.timeout(60)


async def test_a_stream_of_rounds(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir) as server, open_channel(server.addresses[0]) as channel:
        client = DraftClient(channel, lane=3)
        welcome = await client.hello()
        assert welcome.welcome is not None
        assert (welcome.round, welcome.lane, welcome.rows, welcome.welcome.max_outstanding_rounds) == (0, 3, [], 2)
        reply = await client.ask(opens=[open_request([1, 2, 3, 9, 1, 2], slot=4, epoch=8)], rows=[DraftRow(4, 8, 6, 3)])
        assert (reply.round, reply.lane, reply.session) == (1, 3, 1)
        (row,) = reply.rows
        assert (row.status, row.slot, row.epoch, row.base_len, row.draft_tokens) == (RowStatus.OK, 4, 8, 6, [3, 9, 1])
        assert row.confidences.tolist() == pytest.approx([2 / 3] * 3)
        timing = reply.timing
        assert 0 < timing.received_ns <= timing.started_ns <= timing.finished_ns <= timing.sent_ns
        reply = await client.ask(commits=[DraftCommit(4, 8, 6, [3, 9])], rows=[DraftRow(4, 8, 8, 3), DraftRow(5, 1, 1, 3)])
        assert [(row.status, row.draft_tokens) for row in reply.rows] == [(RowStatus.OK, [1, 2, 3]), (RowStatus.STALE, [])]
        assert "slot 5" in reply.rows[1].error
        await client.finish()
        with pytest.raises(EOFError):
            await client.receive()


async def test_hello_may_carry_a_round_and_rounds_without_rows_have_no_answer(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir) as server, draft_stream(server.addresses[0]) as client:
        await client.tell(opens=[open_request([1, 1])])
        await client.tell(commits=[DraftCommit(0, 1, 2, [1])])
        reply = await client.ask(rows=[DraftRow(0, 1, 3, 9)])
        assert reply.round == 3
        # Tokens 1 1 1: the longest repeated suffix is 1 1, and one token follows its first occurrence.
        assert reply.rows[0].draft_tokens == [1]


async def test_streams_are_sessions_of_their_own(socket_dir: Path) -> None:
    async with (
        serve_drafter(socket_dir) as server,
        draft_stream(server.addresses[0], lane=0) as a,
        draft_stream(server.addresses[0], lane=1) as b,
    ):
        await a.ask(opens=[open_request([5, 6, 5], slot=0)], rows=[DraftRow(0, 1, 3, 2)])
        reply = await b.ask(opens=[open_request([7, 8, 9, 7, 8], slot=0)], rows=[DraftRow(0, 1, 5, 2)])
        assert reply.rows[0].draft_tokens == [9, 7]
        await a.tell(opens=[open_request([1], slot=0, epoch=2)])
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await a.receive()
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "slot 0" in str(failure.value.details())
        assert server.worker.pool.num_free == 63
        assert (await b.ask(rows=[DraftRow(0, 1, 5, 2)])).rows[0].draft_tokens == [9, 7]


@pytest.mark.parametrize("way", ["finish", "cancel", "channel"])
async def test_a_stream_that_ends_frees_its_sequences(socket_dir: Path, way: str) -> None:
    method = ScriptedMethod()
    async with serve_drafter(socket_dir, build=lambda _: method) as server:
        channel = open_channel(server.addresses[0])
        client = DraftClient(channel)
        await client.hello()
        await client.ask(opens=[open_request([1, 2], slot=slot) for slot in range(10)], rows=[DraftRow(0, 1, 2, 1)])
        assert server.worker.pool.num_free == 54
        if way == "finish":
            await client.finish()
        elif way == "cancel":
            client.cancel()
        else:
            await channel.close(0)
        assert await asyncio.to_thread(method.emptied.wait, 10)
        async with draft_stream(server.addresses[0]) as other:
            await other.ask(rows=[DraftRow(0, 1, 2, 1)])
        assert server.worker.pool.num_free == 64
        await channel.close()


async def test_an_unexpected_fault_in_a_message_ends_its_stream(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_drafter(socket_dir) as server, draft_stream(server.addresses[0]) as client:

        def fail(_: pb.DraftRequest) -> DraftRound:
            raise KeyError("a fault")

        monkeypatch.setattr("specwire.wire.draft.unpack_round", fail)
        await client.tell()
        with pytest.raises(grpc.aio.AioRpcError, match="KeyError") as failure:
            await client.receive()
        assert failure.value.code() is grpc.StatusCode.INTERNAL


async def test_a_stream_needs_a_hello(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir) as server, open_channel(server.addresses[0]) as channel:
        client = DraftClient(channel)
        await client.send(DraftRound(1, 0, 1))
        with pytest.raises(grpc.aio.AioRpcError, match="no hello"):
            await client.receive()
        empty = DraftClient(channel)
        await empty.finish()
        with pytest.raises(EOFError):
            await empty.receive()


async def test_a_message_that_cannot_be_read_ends_its_stream(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir) as server, open_channel(server.addresses[0]) as channel:
        call = pb_grpc.DrafterServiceStub(channel).Draft()
        await call.write(pb.DraftRequest(hello={"coordinator_id": "x"}))
        await call.read()
        await call.write(pb.DraftRequest(round=1, rows=pb.DraftRows(slots=b"123")))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "rows.slots" in str(failure.value.details())


async def test_random_messages_never_end_a_stream_unless_they_open_a_live_slot(socket_dir: Path) -> None:
    """Half of the rows and commits fit their sequence, the others are noise."""
    rng = random.Random(5)

    def noise() -> tuple[int, int, int]:
        return rng.randrange(-2, 8), rng.randrange(-1, 4), rng.randrange(-2, 30)

    async with serve_drafter(socket_dir) as server, draft_stream(server.addresses[0]) as client:
        live: dict[int, tuple[int, int]] = {}  # slot -> (epoch, number of tokens)
        num_ok = 0
        for number in range(200):
            closes = [SlotRef(rng.randrange(6), rng.randrange(4)) for _ in range(rng.randrange(3))]
            for close in closes:
                if close.slot in live and live[close.slot][0] == close.epoch:
                    del live[close.slot]
            free = [slot for slot in range(6) if slot not in live]
            opens = [
                open_request([rng.randrange(-3, 3) for _ in range(rng.randrange(9))], slot=slot, epoch=rng.randrange(4))
                for slot in rng.sample(free, rng.randrange(len(free) + 1))
            ]
            live |= {request.slot: (request.epoch, len(request.token_ids)) for request in opens}
            commits = []
            for _ in range(rng.randrange(6)):
                slot, epoch, base_len = (rng.choice([(slot, *life) for slot, life in live.items()] or [noise()])) if rng.random() < 0.5 else noise()
                commits.append(DraftCommit(slot, epoch, base_len, [rng.randrange(-(2**31), 2**31)] * rng.randrange(4)))
                if live.get(slot) == (epoch, base_len):
                    live[slot] = (epoch, base_len + len(commits[-1].token_ids))
            right = [DraftRow(slot, *life, rng.randrange(9)) for slot, life in live.items()]
            rows = [*right, *(DraftRow(*noise(), rng.randrange(-3, 99)) for _ in range(1 + len(right)))]
            rng.shuffle(rows)
            reply = await client.ask(closes=closes, opens=opens, commits=commits, rows=rows)
            assert reply.round == number + 1
            assert [(row.slot, row.epoch, row.base_len) for row in reply.rows] == [row[:3] for row in rows]
            assert all(row.status is RowStatus.OK or (row.error and not row.draft_tokens) for row in reply.rows)
            assert server.worker.pool.num_free == 64 - len(live)
            num_ok += sum(row.status is RowStatus.OK for row in reply.rows)
    assert num_ok > 400


async def test_many_messages_at_once_are_all_answered(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir, build=lambda _: ScriptedMethod()) as server, draft_stream(server.addresses[0]) as client:
        await client.tell(opens=[open_request([1])])
        numbers = [await client.tell(rows=[DraftRow(0, 1, 1, 1)]) for _ in range(20 * MAX_OUTSTANDING_ROUNDS)]
        assert [(await client.receive()).round for _ in numbers] == numbers
        await client.tell(rows=[DraftRow(0, 1, 1, 1)])
        await client.finish()
        assert (await client.receive()).rows[0].draft_tokens == [2]
        with pytest.raises(EOFError):
            await client.receive()


async def test_describe(socket_dir: Path) -> None:
    config = DrafterConfig(max_num_seqs=7, speculative_config=SpeculativeConfig(num_speculative_tokens=3, max_model_len=99))
    async with serve_drafter(socket_dir, config) as server:
        first, second = await describe(server.addresses[0]), await describe(server.addresses[0])
    assert first == second
    assert (first.method, first.vocab_size, first.tokenizer_fingerprint) == ("ngram", 0, "")
    assert (first.max_num_draft_tokens, first.max_num_seqs, first.max_model_len, first.max_message_bytes) == (3, 7, 99, 64 << 20)
    assert first.instance_id
    assert first.build


async def test_costs_are_measured_before_the_drafter_is_ready(socket_dir: Path) -> None:
    server = DrafterServer(DrafterConfig(listen=(f"unix:{socket_dir}/d",)))
    await server.start()
    await server.wait_ready()
    costs = (await describe(server.addresses[0])).draft_cost
    assert {cost.num_draft_tokens for cost in costs} == {1, 2, 3, 4, 5}
    assert costs[0].num_sequences == 1
    assert all(0 < cost.draft_ms < 1000 for cost in costs)
    assert await server.stop()


async def test_not_serving_while_it_loads(socket_dir: Path) -> None:
    loading = asyncio.Event()
    loop = asyncio.get_running_loop()
    released: asyncio.Future[None] = loop.create_future()

    def build(_: DrafterConfig) -> Method:
        loop.call_soon_threadsafe(loading.set)
        asyncio.run_coroutine_threadsafe(_wait(released), loop).result(10)
        return ScriptedMethod()

    server = DrafterServer(DrafterConfig(listen=(f"unix:{socket_dir}/d",)), build, cost_budget_s=0)
    await server.start()
    await loading.wait()
    async with open_channel(server.addresses[0]) as channel:
        assert not await is_serving(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
            await describe(server.addresses[0])
        with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
            await DraftClient(channel).hello()
        released.set_result(None)
        await server.wait_ready()
        assert await is_serving(channel)
        assert await server.stop()
        assert not await is_serving(channel)


async def _wait(future: "asyncio.Future[None]") -> None:
    await future


async def test_streams_end_at_once_when_the_drafter_stops(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir) as server:
        async with draft_stream(server.addresses[0]) as client:
            await client.ask(opens=[open_request([1, 1])], rows=[DraftRow(0, 1, 2, 1)])
            started = time.monotonic()
            stopping = asyncio.create_task(server.stop(grace_s=1000))
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await client.receive()
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await stopping
            assert time.monotonic() - started < 60
        assert server.worker.pool.num_free == 64


def test_methods_that_are_not_built_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'medusa' is not built; use one of ngram, draft_model"):
        SpeculativeConfig(method="medusa")
    with pytest.raises(InvalidArgumentError, match="method is null"):
        build_method(DrafterConfig(speculative_config=SpeculativeConfig(method=None)))


async def test_a_drafter_whose_batches_keep_failing_ends(socket_dir: Path) -> None:
    def fail(tokens: list[int], num_drafts: int) -> list[int]:
        raise RuntimeError("no device")

    async with serve_drafter(socket_dir, build=lambda _: ScriptedMethod(fail)) as server:
        broken = asyncio.create_task(server.wait_broken())
        for _ in range(5):
            assert not broken.done()
            async with draft_stream(server.addresses[0]) as client:
                with pytest.raises(grpc.aio.AioRpcError, match="RuntimeError in drafting"):
                    await client.ask(opens=[open_request([3])], rows=[DraftRow(0, 1, 1, 2)])
        with pytest.raises(InternalError, match=r"5 batches in a row failed, the last one with RuntimeError: no device"):
            await asyncio.wait_for(broken, 60)
