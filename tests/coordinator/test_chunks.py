"""How much of prefills a step carries beside decodes, which of them get it, and what decoding sequences feel of it."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.chunks import ChunkLimit, share_chunks
from specwire.messages import VerifyCost, VerifyRound
from specwire.messages.common import RoundTiming
from specwire.policy.cost import verify_ms
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

A_MS_A_TOKEN = VerifyCost((1, 1000), (1.0, 1000.0))
"""So that a bound in milliseconds is one in tokens."""


@dataclass(eq=False)
class Prefill:
    """What share_chunks sees of a slot."""

    num_remaining_tokens: int
    order: tuple[int, int, int]
    sequence: Any = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = SimpleNamespace(order=self.order)


def share(budget: int, *prefills: tuple[int, int]) -> list[int]:
    """Tokens of each prefill, given as (priority, tokens left) in the order of their arrival."""
    slots: list[Any] = [Prefill(num_tokens, (priority, arrival, 0)) for arrival, (priority, num_tokens) in enumerate(prefills)]
    chunks = dict(share_chunks(slots, budget))
    return [chunks.get(slot, 0) for slot in slots]


@pytest.mark.parametrize(
    ("budget", "prefills", "shares"),
    [
        (100, [], []),
        (0, [(0, 10)], [0]),
        (100, [(0, 500)], [100]),
        (100, [(0, 60), (0, 40)], [60, 40]),
        (100, [(0, 500), (0, 30)], [70, 30]),
        (100, [(0, 500), (0, 90), (0, 40)], [25, 35, 40]),
        (100, [(0, 500), (0, 500), (0, 500)], [100, 0, 0]),
        (100, [(0, 10), (0, 500), (0, 80)], [10, 10, 80]),
        (1, [(0, 500), (0, 1)], [1, 0]),
        (100, [(5, 10), (0, 500), (0, 60)], [0, 40, 60]),
        (100, [(5, 40), (0, 50), (0, 30)], [20, 50, 30]),
    ],
)
def test_shares(budget: int, prefills: list[tuple[int, int]], shares: list[int]) -> None:
    assert share(budget, *prefills) == shares


@given(st.integers(1, 60), st.lists(st.tuples(st.integers(-1, 1), st.integers(1, 50)), min_size=1, max_size=8))
def test_shares_are_by_importance_then_length_and_the_oldest_goes_on(budget: int, prefills: list[tuple[int, int]]) -> None:
    shares = share(budget, *prefills)
    assert sum(shares) == min(budget, sum(left for _, left in prefills))
    assert all(0 <= tokens <= left for tokens, (_, left) in zip(shares, prefills, strict=True))
    most_important = min(priority for priority, _ in prefills)
    oldest = next(index for index, (priority, _) in enumerate(prefills) if priority == most_important)
    assert shares[oldest] >= min(prefills[oldest][1], budget / 4)
    for index, (priority, left) in enumerate(prefills):
        for other, (other_priority, other_left) in enumerate(prefills):
            if index != oldest and shares[index] and (other_priority, other_left) < (priority, left):
                assert shares[other] == other_left, "the more important and the shorter ones come first"


@st.composite
def costs(draw: st.DrawFn) -> VerifyCost:
    """Tables whose chunk curve lies above the graphs' one."""
    sizes = tuple(sorted(draw(st.sets(st.integers(1, 300), min_size=2, max_size=6))))
    times = tuple(sorted(draw(st.lists(st.floats(0.1, 100), min_size=len(sizes), max_size=len(sizes)))))
    row_tokens = draw(st.sampled_from([0, 5]))
    return VerifyCost(
        sizes, times, draw(st.sampled_from([0.0, 0.01])), draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([0, sizes[0], sizes[-1]])),
        row_tokens, sizes if row_tokens else (), tuple(time + 3 for time in times) if row_tokens else (),
    )  # fmt: skip


@given(costs(), st.floats(0.5, 200), st.integers(1, 16), st.integers(0, 600), st.lists(st.integers(1, 300), max_size=5), st.integers(0, 20))
def test_the_limit_is_the_most_that_fits(cost: VerifyCost, gap_ms: float, least: int, budget: int, lengths: list[int], num_drafts: int) -> None:
    decodes: list[Any] = [SimpleNamespace(token_ids=range(length)) for length in lengths]
    num_drafts = num_drafts if decodes else 0
    found = ChunkLimit(gap_ms, cost, least, "").num_tokens(budget, decodes, num_drafts)
    num_tokens, num_kv = len(decodes) + num_drafts, sum(lengths)
    limit_ms = max(gap_ms, 2 * verify_ms(cost, num_tokens, len(decodes), num_kv) if decodes else 0)
    fitting = [n for n in range(1, budget + 1) if verify_ms(cost, num_tokens + n, len(decodes) + 1, num_kv, longest_row=n) <= limit_ms]
    assert found == max([*fitting, min(least, budget)])


def test_without_a_table_or_a_bound_all_fits() -> None:
    assert ChunkLimit(10, VerifyCost(), 16, "").num_tokens(5000, [], 0) == 5000
    assert ChunkLimit(0, A_MS_A_TOKEN, 16, "").num_tokens(5000, [], 0) == 5000


def answer(limit: ChunkLimit, num_tokens: int, ms: float, *, is_chunk: bool) -> None:
    """A round was computed. Only every fourth one without chunks is looked at."""
    rows = [SimpleNamespace(base_len=0, token_budget=num_tokens if is_chunk else 0)]
    round_: Any = SimpleNamespace(number=4, rows=rows, plan=SimpleNamespace(chunks=rows if is_chunk else []))
    result: Any = SimpleNamespace(num_padded_tokens=num_tokens, timing=RoundTiming(1, 10, 10 + round(ms * 1e6), 0))
    limit.answered(round_, result)


def test_the_limit_follows_what_rounds_take() -> None:
    """Rounds with chunks that take three times as long as the table says get a third of the tokens."""
    limit = ChunkLimit(90, A_MS_A_TOKEN, 1, "")
    assert limit.num_tokens(1000, [], 0) == 90
    for _ in range(200):
        answer(limit, 64, 192, is_chunk=True)
    assert limit.num_tokens(1000, [], 0) == 30
    answer(limit, 0, 1, is_chunk=True)
    assert limit.num_tokens(1000, [], 0) == 30


def test_twice_what_decoding_takes_now_and_not_by_the_table() -> None:
    """A table that was measured on a busy machine must not let chunks take longer."""
    limit, decodes = ChunkLimit(10, A_MS_A_TOKEN, 1, ""), [SimpleNamespace(token_ids=[5])] * 30
    assert limit.num_tokens(1000, decodes, 0) == 30  # type: ignore[arg-type]
    for _ in range(200):
        answer(limit, 30, 20, is_chunk=False)
    assert 9 <= limit.num_tokens(1000, decodes, 0) <= 10  # type: ignore[arg-type]
    for _ in range(200):
        answer(limit, 40, 20, is_chunk=True)
    assert 49 <= limit.num_tokens(1000, decodes, 0) <= 50  # type: ignore[arg-type]


# --- over a scripted verifier ---------------------------------------------------------------------------------------

PROMPT = [5, 6, 7, 8, 9]


def num_tokens(message: VerifyRound) -> int:
    return sum(row.token_budget or 1 + len(row.draft_tokens) for row in message.rows)


def gaps(rounds: list[VerifyRound]) -> list[int]:
    """For each row of a sequence that decodes: tokens of all rounds after its row before, up to its own."""
    last_rows: dict[tuple[int, int], int] = {}
    found, num_before = [], [0]
    for index, message in enumerate(rounds, start=1):
        num_before.append(num_before[-1] + num_tokens(message))
        for row in message.rows:
            if not row.token_budget:
                if (row.slot, row.epoch) in last_rows:
                    found.append(num_before[index] - num_before[last_rows[row.slot, row.epoch]])
                last_rows[row.slot, row.epoch] = index
    return found


@dataclass(frozen=True)
class Arrival:
    """A request that comes some steps after the one before."""

    num_steps: int
    num_prompt: int
    max_tokens: int
    priority: int
    runs_ahead: bool


arrivals = st.builds(
    Arrival, st.integers(0, 4), st.one_of(st.integers(1, 8), st.integers(50, 400)), st.integers(1, 30), st.sampled_from([0, 0, 1]), st.booleans()
)


async def serve(requests: list[Arrival], drafters: list[DrafterScript]) -> list[VerifyRound]:
    """The rounds of a lane that gets these requests."""
    script = VerifierScript(max_num_seqs=8, verify_cost=A_MS_A_TOKEN, prefix_caching=False)
    async with Cluster([script], drafters, k=3, max_decode_gap_ms=40, max_outstanding_rounds=2, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        running: list[Running] = []
        for index, arrival in enumerate(requests):
            due = cluster.num_steps + arrival.num_steps
            # Without a sequence there are no steps.
            await cluster.until(lambda due=due: cluster.num_steps >= due or all(request.sink.ended for request in running))  # type: ignore[misc]
            bad_words = () if arrival.runs_ahead else ((1, 2),)
            prompt, max_tokens, priority = [3 + index] * arrival.num_prompt, arrival.max_tokens, arrival.priority
            running.append(cluster.submit(prompt, seed=index, max_tokens=max_tokens, priority=priority, bad_words_token_ids=bad_words))
        for request in running:
            await request.check()
        return list(cluster.verifiers[0].received)


@settings(max_examples=25)
@given(st.lists(arrivals, min_size=1, max_size=16))
def test_gaps_stay_within_the_bound_whatever_arrives(requests: list[Arrival]) -> None:
    """40 ms are 40 tokens; sequences whose next row needs the token of the last one miss every other round."""
    rounds = asyncio.run(serve(requests, []))
    host_sampled = any(not arrival.runs_ahead for arrival in requests)
    assert max(gaps(rounds), default=0) <= 40 * (1 + host_sampled)


@settings(max_examples=15)
@given(st.lists(arrivals, min_size=1, max_size=16))
def test_rounds_stay_within_the_bound_beside_drafts(requests: list[Arrival]) -> None:
    """Or take twice the tokens of decoding alone: four a sequence at most."""
    for message in asyncio.run(serve(requests, [DrafterScript(acceptance=0.7)])):
        num_decodes = sum(not row.token_budget for row in message.rows)
        assert num_tokens(message) <= max(40, 8 * num_decodes) or not num_decodes


async def test_cached_prompts_take_no_more_of_the_bound_than_they_compute() -> None:
    """Twelve prompts of 33 tokens, of which the cache has 32, beside a sequence that decodes: one fits into a round of 40 tokens, or twelve do."""
    prompts = [[7 + index] * 33 for index in range(12)]
    async with Cluster([VerifierScript(verify_cost=A_MS_A_TOKEN)], max_decode_gap_ms=40) as cluster:
        await cluster.ready()
        for prompt in prompts:
            await cluster.submit(prompt, seed=2, max_tokens=1).check()
        decoding = cluster.submit(PROMPT, seed=1, max_tokens=100)
        await cluster.until(lambda: bool(decoding.sink.choices[0].token_ids))
        rounds = cluster.verifiers[0].received
        rounds.clear()
        for request in [cluster.submit(prompt, seed=2, max_tokens=1) for prompt in prompts]:
            await request.check()
        assert sum(any(row.token_budget for row in message.rows) for message in rounds) <= 7
        assert all(num_tokens(message) <= 40 for message in rounds)
        assert len({message.round for message in rounds if message.opens}) <= 5
        await decoding.check()


async def test_without_a_bound_chunks_are_as_long_as_rounds() -> None:
    for gap_ms, most in ((0, 128), (40, 40)):
        async with Cluster([VerifierScript(verify_cost=A_MS_A_TOKEN)], max_decode_gap_ms=gap_ms) as cluster:
            await cluster.ready()
            decoding = cluster.submit(PROMPT, seed=1, max_tokens=100)
            await cluster.until(lambda decoding=decoding: bool(decoding.sink.choices[0].token_ids))  # type: ignore[misc]
            await cluster.submit([7] * 400, seed=2, max_tokens=1).check()
            assert max(map(num_tokens, cluster.verifiers[0].received)) == most
            await decoding.check()


async def test_a_verifier_without_a_table_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster() as cluster:
        await cluster.ready()
        decoding = cluster.submit(PROMPT, seed=1, max_tokens=100)
        await cluster.until(lambda: bool(decoding.sink.choices[0].token_ids))
        assert cluster.engine.counters.num_unbounded_rounds == 0
        await cluster.submit([7] * 200, seed=2, max_tokens=1).check()
        assert cluster.engine.counters.num_unbounded_rounds == 2
        assert "lane 0: its verifier has no cost table" in caplog.text
        await decoding.check()


async def test_a_long_prompt_goes_on_in_a_stream_of_short_ones() -> None:
    """Short ones fill every round, and a quarter is the long one's all the same."""
    async with Cluster([VerifierScript(max_num_batched_tokens=32, prefix_caching=False)]) as cluster:
        await cluster.ready()
        long = cluster.submit([7] * 400, seed=0, max_tokens=1)
        short = [cluster.submit([8] * 16, seed=seed, max_tokens=1) for seed in range(1, 9)]
        num_done = 0
        while not long.sink.ended:
            await cluster.until(lambda: long.sink.ended or any(request.sink.ended for request in short))
            for index, request in enumerate(short):
                if request.sink.ended:
                    num_done += 1
                    short[index] = cluster.submit([8] * 16, seed=index, max_tokens=1)
        num_rounds = cluster.verifiers[0].num_rounds
        assert num_rounds <= 400 / 8 + 4
        assert num_done >= num_rounds, "24 tokens of each round are one and a half of the short ones"
        await long.check()


async def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    async with Cluster([VerifierScript(max_num_batched_tokens=32)]) as cluster:
        await cluster.ready()
        long = cluster.submit([7] * 400, seed=0, max_tokens=1)
        await cluster.until(lambda: cluster.verifiers[0].num_rounds >= 2)
        num_rounds = cluster.verifiers[0].num_rounds
        await cluster.submit(PROMPT, seed=1, max_tokens=1).check()
        assert cluster.verifiers[0].num_rounds <= num_rounds + 4
        assert not long.sink.ended
        await long.check()


async def test_the_more_important_prompt_goes_first() -> None:
    """Though it came later and is longer."""
    async with Cluster([VerifierScript(max_num_batched_tokens=32, prefix_caching=False)]) as cluster:
        await cluster.ready()
        first = cluster.submit([7] * 200, seed=0, max_tokens=1, priority=1)
        await cluster.until(lambda: cluster.verifiers[0].num_rounds >= 1)
        important = cluster.submit([8] * 300, seed=1, max_tokens=1, priority=0)
        await important.check()
        assert not first.sink.ended
        await first.check()
