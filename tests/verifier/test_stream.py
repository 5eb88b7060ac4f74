"""The verifier over real gRPC: streams, run-ahead, one coordinator at a time, errors as statuses."""

import asyncio

import grpc
import pytest

from specwire.messages import SlotRef, VerifyRound
from tests.verifier.harness import PROMPT, LaunchGate, Rounds, ahead, decode, ends_with, make_verifier, open_message, prefill, serve
from tests.waiting import until

Code = grpc.StatusCode


# --- rounds ---------------------------------------------------------------------------------------------------------


async def test_a_generation_with_drafts(served, truth):
    rounds, stream = Rounds(served.verifier), served.stream()
    welcome = await stream.start()
    assert (welcome.round, welcome.rows, welcome.welcome.instance_id, welcome.welcome.free_blocks) == (0, [], "instance-1", 64)
    first = await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    assert (first.session, first.round) == (1, 1)
    assert 0 < first.timing.received_ns <= first.timing.started_ns <= first.timing.finished_ns <= first.timing.sent_ns
    tokens = PROMPT + first.rows[0].token_ids
    second = await stream.round_trip(rounds.build([decode(0, tokens, [*truth[1:3], 60])]))
    assert (second.rows[0].num_accepted, second.rows[0].token_ids) == (2, truth[1:4])
    closed = await stream.round_trip(rounds.build(closes=[SlotRef(0, 1)]))
    assert (closed.rows, closed.free_blocks, closed.promised_blocks) == ([], 64, 0)
    await stream.finish()
    assert await stream.receive() is None


async def test_hello_may_carry_the_first_round(served, truth):
    stream = served.stream()
    await stream.send(Rounds(served.verifier).build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    welcome, first = await stream.receive(), await stream.receive()
    assert welcome.welcome is not None
    assert first.rows[0].token_ids == truth[:1]


async def test_run_ahead_keeps_two_rounds_outstanding(served, truth):
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.send(rounds.build([prefill(0, 4)], opens=[open_message(0, PROMPT)]))
    await stream.send(rounds.build([prefill(0, 4)]))
    got = []
    for base_len in range(len(PROMPT) + 1, len(PROMPT) + 11):
        got += (await stream.receive()).rows[0].token_ids
        await stream.send(rounds.build([ahead(0, base_len, rounds.round)]))
    for _ in range(2):
        got += (await stream.receive()).rows[0].token_ids
    assert got == truth[:11]


async def test_promised_blocks_cover_queued_rounds(served):
    gate = LaunchGate(served.verifier)
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.send(rounds.build([prefill(0, 17)], opens=[open_message(0, list(range(60)))]))
    await stream.send(rounds.build([prefill(0, 43)]))
    await until(lambda: gate.num_launched == 1 and len(served.server._gate._holder._queued) == 1)
    gate.open()
    first, second = await stream.receive(), await stream.receive()
    assert (first.free_blocks, first.promised_blocks) == (62, 2)
    assert (second.free_blocks, second.promised_blocks) == (60, 0)


@pytest.mark.parametrize(("ours", "theirs", "effective"), [(2, 2, 2), (2, 5, 2), (3, 1, 1)])
async def test_more_than_w_outstanding_rounds_end_the_stream(model, socket_dir, ours, theirs, effective):
    async with serve(make_verifier(model), socket_dir, max_outstanding_rounds=ours) as served:
        gate = LaunchGate(served.verifier)
        rounds, stream = Rounds(served.verifier), served.stream(max_outstanding_rounds=theirs)
        assert (await stream.start()).welcome.max_outstanding_rounds == effective
        for _ in range(effective + 1):
            await stream.send(rounds.build())
        await until(lambda: served.server._gate._holder._is_closed)
        gate.open()
        for _ in range(effective):
            assert (await stream.receive()).rows == []
        await ends_with(stream, Code.FAILED_PRECONDITION, f"max_outstanding_rounds is {effective}")


# --- ends of streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["finish", "cancel", "channel"])
async def test_the_end_of_a_stream_frees_everything(served, how):
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, list(range(60)))]))
    assert served.verifier.num_free_blocks == 60
    if how == "finish":
        await stream.finish()
        assert await stream.receive() is None
    elif how == "cancel":
        stream.cancel()
    else:
        await served.channel.close()
    await until(lambda: served.verifier.num_open_slots == 0)
    assert served.verifier.num_free_blocks == 64
    served.verifier.check_integrity()


async def test_queued_rounds_of_an_ended_stream_never_run(served):
    gate = LaunchGate(served.verifier)
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    await stream.send(rounds.build([prefill(1, 99)], opens=[open_message(1, PROMPT)]))
    await until(lambda: gate.num_launched == 1)
    stream.cancel()
    other = served.stream("d")
    async with asyncio.timeout(60):  # the running round does not keep the next coordinator out
        while True:
            try:
                await other.start()
                break
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                other = served.stream("d")
    gate.open()
    answer = await other.round_trip(Rounds(served.verifier).build())
    assert gate.num_launched == 2
    assert (answer.free_blocks, served.verifier.num_open_slots) == (64, 0)


# --- one coordinator at a time --------------------------------------------------------------------------------------


async def test_a_second_coordinator_is_refused_by_name(served, truth):
    holder, other = served.stream("lane-a"), served.stream("lane-b", incarnation=99)
    await holder.start()
    await other.send(VerifyRound(1, 0, 0))
    await ends_with(other, Code.FAILED_PRECONDITION, "coordinator 'lane-a' holds this verifier, and 'lane-b' cannot have it too")
    answer = await holder.round_trip(Rounds(served.verifier).build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    assert answer.rows[0].token_ids == truth[:1]


async def test_a_lower_incarnation_is_refused(served):
    holder, old = served.stream("c", incarnation=5), served.stream("c", incarnation=4)
    await holder.start()
    await old.send(VerifyRound(1, 0, 0))
    await ends_with(old, Code.FAILED_PRECONDITION, "incarnation 5 of coordinator 'c' holds this verifier, and 4 is older")
    assert (await holder.round_trip(VerifyRound(1, 0, 1))).round == 1


@pytest.mark.parametrize("incarnation", [5, 6])
async def test_an_equal_or_higher_incarnation_takes_over_at_once(served, truth, incarnation):
    gate = LaunchGate(served.verifier)
    holder, rounds = served.stream("c", incarnation=5), Rounds(served.verifier)
    await holder.start()
    await holder.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))  # will be running
    await holder.send(rounds.build([prefill(1, 99)], opens=[open_message(1, PROMPT)]))  # will be queued
    await until(lambda: gate.num_launched == 1)
    heir, new = served.stream("c", incarnation=incarnation), Rounds(served.verifier)
    welcome = await heir.start()
    assert welcome.welcome.free_blocks == 64
    await ends_with(holder, Code.ABORTED, f"taken over by a new stream of coordinator 'c', incarnation {incarnation}")
    await heir.send(new.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))  # the same slot and epoch
    gate.open()
    answer = await heir.receive()
    assert (answer.rows[0].token_ids, gate.num_launched, served.verifier.num_open_slots) == (truth[:1], 2, 1)
    assert answer.free_blocks == 63


async def test_the_verifier_is_free_after_its_coordinator(served):
    for name, incarnation in (("a", 9), ("b", 1), ("a", 1)):
        stream = served.stream(name, incarnation)
        await stream.start()
        await stream.finish()
        assert await stream.receive() is None
