"""The verifier over real gRPC while its rounds take their time: launched as they come, answered as they arrive."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from specwire.engine.models.decoder import Decoder
from specwire.messages import SlotRef
from tests.verifier.harness import PROMPT, Rounds, Served, ahead, ends_with, make_verifier, open_message, prefill, serve
from tests.verifier.late import LateExecutor
from tests.waiting import until

BASE = len(PROMPT) + 1


@dataclass
class Late:
    """A served verifier and what its rounds wait for."""

    served: Served
    executor: LateExecutor

    async def launched(self, count: int) -> None:
        """Returns once so many rounds with rows are launched."""
        await until(lambda: len(self.executor.launched) >= count)
        assert len(self.executor.launched) == count


@pytest.fixture
async def late(model: Decoder, socket_dir: Path) -> AsyncIterator[Late]:
    verifier = make_verifier(model, executor="rounds", num_in_flight=3)
    executor = verifier._executor = LateExecutor(verifier._executor)
    async with serve(verifier, socket_dir, max_outstanding_rounds=3) as served:
        try:
            yield Late(served, executor)
        finally:
            for each in executor.launched:
                each.arrive()


async def start(late: Late, max_outstanding_rounds: int = 2):
    """A stream with two rounds in flight: a prompt, and the token behind the one that it samples."""
    rounds, stream = Rounds(late.served.verifier), late.served.stream(max_outstanding_rounds=max_outstanding_rounds)
    await stream.start()
    await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    await stream.send(rounds.build([ahead(0, BASE, 1)]))
    await late.launched(2)
    return rounds, stream


async def test_rounds_are_launched_before_the_first_is_read_and_answered_in_order(late, truth):
    _, stream = await start(late)
    first, second = late.executor.launched
    assert late.served.verifier.num_unread_rounds == 2
    second.arrive()  # cannot be before the first, but an answer must not depend on that
    first.arrive()
    answers = [await stream.receive(), await stream.receive()]
    assert [answer.rows[0].token_ids for answer in answers] == [truth[:1], truth[1:2]]
    assert [answer.round for answer in answers] == [1, 2]
    assert late.served.verifier.num_unread_rounds == 0


async def test_a_round_is_launched_while_another_is_waited_for(late, truth):
    rounds, stream = await start(late, 3)
    await stream.send(rounds.build([ahead(0, BASE + 1, 2)]))
    await late.launched(3)
    for each in late.executor.launched:
        each.arrive()
    assert [(await stream.receive()).rows[0].token_ids[0] for _ in range(3)] == truth[:3]


async def test_a_rounds_time_begins_when_the_round_before_it_is_done(late):
    _, stream = await start(late)
    late.executor.launched[0].arrive()
    first = (await stream.receive()).timing
    late.executor.launched[1].arrive()
    second = (await stream.receive()).timing
    assert first.received_ns <= first.started_ns <= second.started_ns <= first.finished_ns <= second.finished_ns
    assert second.received_ns <= second.started_ns
    assert second.started_ns > first.started_ns


async def test_a_close_behind_rounds_in_flight_frees_blocks_at_once(late, truth):
    rounds, stream = await start(late, 3)
    await stream.send(rounds.build([prefill(1, 99)], closes=[SlotRef(0, 1)], opens=[open_message(1, PROMPT)]))
    await late.launched(3)
    for each in late.executor.launched:
        each.arrive()
    answers = [await stream.receive() for _ in range(3)]
    assert [answer.rows[0].token_ids for answer in answers] == [truth[:1], truth[1:2], truth[:1]]
    assert [answer.free_blocks for answer in answers] == [63, 63, 63]


async def test_a_takeover_waits_for_what_is_in_flight(late, truth):
    _, stream = await start(late)
    heir, rounds = late.served.stream(incarnation=2), Rounds(late.served.verifier)
    assert (await heir.start()).welcome.free_blocks == 64
    await ends_with(stream, grpc.StatusCode.ABORTED, "taken over")
    await heir.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))  # the same slot and epoch
    await asyncio.sleep(0.05)
    assert len(late.executor.launched) == 2
    for each in late.executor.launched:
        each.arrive()
    await late.launched(3)
    late.executor.launched[2].arrive()
    answer = await heir.receive()
    assert (answer.rows[0].token_ids, answer.free_blocks) == (truth[:1], 63)
    late.served.verifier.check_integrity()


async def test_a_round_that_fails_in_flight_ends_its_stream_after_the_answers_before_it(late, truth):
    _, stream = await start(late)
    first, second = late.executor.launched
    first.arrive()
    second.arrive(RuntimeError("device lost"))
    assert (await stream.receive()).rows[0].token_ids == truth[:1]
    await ends_with(stream, grpc.StatusCode.INTERNAL, "RuntimeError")
    await until(lambda: late.served.verifier.num_open_slots == 0)
    assert (late.served.verifier.num_free_blocks, late.served.server.metrics.num_faults) == (64, 1)


async def test_stopping_answers_what_is_in_flight(late, truth):
    _, stream = await start(late)
    stopping = asyncio.create_task(late.served.server.stop(5.0))
    await until(lambda: not late.served.server._gate._is_open)
    for each in late.executor.launched:
        each.arrive()
    assert [(await stream.receive()).rows[0].token_ids[0] for _ in range(2)] == truth[:2]
    await ends_with(stream, grpc.StatusCode.UNAVAILABLE)
    assert await stopping
