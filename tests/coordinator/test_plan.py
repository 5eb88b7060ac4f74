"""What goes into a round: decodes before chunks, K by the number that samples, rows that follow tokens still in flight."""

from array import array

import pytest

from specwire.messages import DraftResult, DraftRowResult, RowStatus, VerifyRound
from tests.scripted.cluster import Cluster
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

PROMPT = [5, 6, 7, 8, 9]


def num_tokens(message: VerifyRound) -> int:
    return sum(row.token_budget or 1 + len(row.draft_tokens) for row in message.rows)


async def test_decodes_come_before_chunks() -> None:
    """While a long prompt is computed in chunks, the others decode in every round, and no round passes its budget."""
    async with Cluster([VerifierScript(max_num_batched_tokens=32)]) as cluster:
        await cluster.ready()
        decoding = [cluster.submit(PROMPT, seed=seed, max_tokens=60) for seed in range(4)]
        await cluster.until(lambda: all(request.sink.choices[0].token_ids for request in decoding))
        rounds = cluster.verifiers[0].received
        rounds.clear()
        long = cluster.submit([7] * 300, seed=9, max_tokens=5)
        await long.check()
        assert all(num_tokens(message) <= 32 for message in rounds)
        mixed = [message for message in rounds if any(row.token_budget for row in message.rows)]
        assert 300 / 32 < len(mixed) <= 300 / 28 + 1
        for message in mixed:
            assert [bool(row.token_budget) for row in message.rows] == [False] * 4 + [True]
        for request in decoding:
            await request.check()


async def test_drafts_leave_room_for_chunks() -> None:
    async with Cluster([VerifierScript(max_num_batched_tokens=32)], [DrafterScript()], k=8, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        decoding = [cluster.submit(PROMPT, seed=seed, max_tokens=200) for seed in range(4)]
        await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 10 for request in decoding))
        rounds = cluster.verifiers[0].received
        full = [message for message in rounds if len(message.rows) == 4][-1]
        assert [len(row.draft_tokens) for row in full.rows] == [7] * 4, "32 tokens are 8 a row"
        rounds.clear()
        await cluster.submit([7] * 100, seed=9, max_tokens=5).check()
        mixed = [message for message in rounds if any(row.token_budget for row in message.rows)]
        assert all(num_tokens(message) <= 32 for message in mixed)
        assert all(sum(row.token_budget for row in message.rows) >= 8 for message in mixed[:-1])
        assert any(row.draft_tokens for message in mixed for row in message.rows)


async def test_k_by_the_number_that_samples() -> None:
    """A prefill chunk does not count."""
    schedule = [[1, 1, 5], [2, 2, 3], [3, 3, 1], [4, 16, 0]]
    script = VerifierScript(max_num_batched_tokens=64, delay_s=0.001)
    async with Cluster([script], [DrafterScript()], schedule=schedule, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        requests = [cluster.submit(PROMPT, seed=0, max_tokens=400)]
        rounds = cluster.verifiers[0].received
        for num_decoding, k in ((1, 5), (2, 3), (3, 1), (4, 0)):
            await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 3 for request in requests))
            rounds.clear()
            chunked = cluster.submit([20 + num_decoding] * 250, seed=9, max_tokens=1)
            await chunked.check()
            with_chunks = [message for message in rounds if len(message.rows) == num_decoding + 1 and message.rows[-1].token_budget]
            assert len(with_chunks) > 2
            assert {len(row.draft_tokens) for message in with_chunks for row in message.rows[:-1]} == {k}
            requests.append(cluster.submit(PROMPT, seed=num_decoding, max_tokens=400))
        for request in requests:
            request.handle.cancel()


@pytest.mark.parametrize("num_steps", [0, 3])
async def test_k_is_steady_beside_a_stream_of_short_requests(num_steps: int) -> None:
    """Four sequences decode, and a fifth one samples now and then: one token, by a chunk and a decode row."""
    script = VerifierScript(delay_s=0.001)
    schedule = [[1, 4, 2], [5, 16, 0]]
    async with Cluster([script], [DrafterScript()], schedule=schedule, schedule_hysteresis_steps=num_steps, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        requests = [cluster.submit(PROMPT, seed=seed, max_tokens=400) for seed in range(4)]
        await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 3 for request in requests))
        rounds = cluster.verifiers[0].received
        rounds.clear()
        for seed in range(10):
            await cluster.submit([20 + seed] * 5, seed=seed, max_tokens=2).check()
        assert any(row.draft_tokens for message in rounds for row in message.rows)
        with_five = [message for message in rounds if sum(not row.token_budget for row in message.rows) == 5]
        assert len(with_five) >= 10
        assert any(row.draft_tokens for message in with_five for row in message.rows) == (num_steps > 0)
        for request in requests:
            request.handle.cancel()


async def test_rows_follow_tokens_in_flight() -> None:
    """Without drafts, all rounds but the first few name the round that samples their first token, two are under way at once."""
    async with Cluster(max_outstanding_rounds=2) as cluster:
        await (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=50).check()
        rows = [row for message in cluster.verifiers[0].received for row in message.rows]
        assert len(rows) == 50, "a chunk with the first token, then a row a token; none past max_tokens"
        assert sum(row.from_round > 0 for row in rows) >= 48
        assert all(row.from_round == row.parent_round for row in rows if row.from_round)


async def test_one_round_at_a_time() -> None:
    async with Cluster(max_outstanding_rounds=1) as cluster:
        await (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=50).check()
        assert not any(row.from_round for message in cluster.verifiers[0].received for row in message.rows)


async def test_bad_words_of_several_tokens_never_run_ahead() -> None:
    """The verifier's host needs their tokens, so it must have them first; single tokens are masked on the device."""
    for words, runs_ahead in ((((1, 2),), False), (((1,), (2,)), True)):
        async with Cluster() as cluster:
            await (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=30, bad_words_token_ids=words).check()
            assert any(row.from_round for message in cluster.verifiers[0].received for row in message.rows) == runs_ahead


@pytest.mark.parametrize("num_cached", [0, 16, 64])
async def test_chunks_queue_behind_each_other(num_cached: int) -> None:
    """Two chunks are under way at once. With cached tokens an early chunk reaches the end, and the later ones find nothing to do."""
    async with Cluster([VerifierScript(max_num_batched_tokens=20, max_outstanding_rounds=3)], max_outstanding_rounds=3) as cluster:
        await cluster.ready()
        prompt = [3 + i for i in range(70)]
        if num_cached:
            await cluster.submit([*prompt[:num_cached], 9], seed=5, max_tokens=1).check()
        request = cluster.submit(prompt, seed=1, max_tokens=20)
        await request.check()
        usage = request.sink.choices[0].usage
        assert usage is not None
        assert usage.num_cached_tokens == num_cached
        assert cluster.engine.counters.num_bad_rows == cluster.engine.counters.num_stale_rows == 0


async def test_an_unsolicited_reply_is_used_if_fresh() -> None:
    """Drafts that nobody asked for save the next question, unless the sequence has moved on."""
    async with Cluster(drafters=[DrafterScript()], k=4, max_stream_backlog=3, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        sink = CollectingSink(holds=True, on_tokens=cluster.advance)
        request = cluster.submit(PROMPT, sink, seed=1, max_tokens=30)
        await cluster.until(lambda: sink.num_unread > 3)
        (sequence,) = cluster.engine.lanes[0].running
        place, length = sequence.draft_slot, len(sequence.token_ids)
        assert place is not None
        drafts = request.expected()[length - len(PROMPT) :][:3]
        link = cluster.engine.lanes[0].links[0]
        num_stale = cluster.engine.counters.num_stale_drafts
        for base_len, epoch in ((length - 1, place.epoch), (length, place.epoch + 1), (length, place.epoch)):
            row = DraftRowResult(RowStatus.OK, place.index, epoch, base_len, drafts, array("f", [0.5] * 3))
            link._on_reply(DraftResult(1, 0, 0, [row]))
        assert cluster.engine.counters.num_stale_drafts == num_stale + 2
        num_rounds, num_received = cluster.drafters[0].num_rounds, len(cluster.verifiers[0].received)
        sink.read(1000)
        await cluster.until(lambda: len(cluster.verifiers[0].received) > num_received)
        assert cluster.drafters[0].num_rounds == num_rounds
        assert cluster.verifiers[0].received[-1].rows[0].draft_tokens == drafts
        sink.stop_holding()
        await request.check()
