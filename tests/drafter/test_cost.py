"""What the drafter measures at its start: by K, sequences and context, within its time."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from drafter_svc.cost import DraftProfile, measure_draft_cost
from drafter_svc.draft_model import DraftModel
from drafter_svc.forward import EagerForward
from drafter_svc.method import Ask, Drafts
from drafter_svc.ngram import Ngram
from specwire.engine.kv_cache import KVCache
from specwire.engine.runner import ModelRunner
from specwire.messages import DraftCost, DraftOpen, RowStatus
from tests.drafter.helpers import ScriptedMethod
from tests.drafter.target import tiny_model


class TimedMethod(ScriptedMethod):
    """Calls that take what a formula says of (K, sequences, tokens of all), and tokens that take catch_up_s each, on a clock of their
    own; there are blocks for max_drafts_in_all drafts at once."""

    def __init__(self, ms: Callable[[int, int, int], float], *, max_num_drafts: int = 4, max_num_seqs: int = 8, max_drafts_in_all: int = 99) -> None:
        super().__init__(max_num_drafts=max_num_drafts, max_num_seqs=max_num_seqs)
        self.now_s = 0.0
        self.catch_up_s = 0.0
        self.longest = 0
        self._ms, self._max_drafts_in_all = ms, max_drafts_in_all

    def clock(self) -> float:
        return self.now_s

    def append(self, seq_id: int, token_ids: list[int]) -> None:  # type: ignore[override]
        super().append(seq_id, token_ids)
        self.now_s += len(token_ids) * self.catch_up_s
        self.longest = max(self.longest, len(self.sequences[seq_id]))

    def propose(self, asks: list[Ask]) -> list[Drafts]:  # type: ignore[override]
        if sum(ask.num_drafts for ask in asks) > self._max_drafts_in_all:
            return [Drafts(RowStatus.OUT_OF_BLOCKS)] * len(asks)
        self.now_s += self._ms(asks[0].num_drafts, len(asks), sum(len(self.sequences[ask.seq_id]) for ask in asks)) / 1e3
        return super().propose(asks)

    def measure(self, budget_s: float, context_len: int = 0) -> DraftProfile:
        return measure_draft_cost(self, budget_s, chunk=64, context_len=context_len, clock=self.clock)


def linear(k: int, num_seqs: int, num_tokens: int) -> float:
    return k * (2.0 + 0.1 * num_seqs + 1e-6 * (num_tokens - 32 * num_seqs))


def test_costs_cover_every_k_and_powers_of_two_of_sequences() -> None:
    method = TimedMethod(linear, max_num_seqs=6)
    profile = method.measure(budget_s=100)
    assert profile.costs == tuple(DraftCost(k, n, pytest.approx(linear(k, n, 32 * n), rel=1e-3)) for n in (1, 2, 4, 6) for k in (1, 2, 3, 4))
    assert profile.ms_per_kv_token == 0.0
    assert not method.sequences


def test_context_costs_each_draft_position() -> None:
    method = TimedMethod(linear)
    assert method.measure(budget_s=100, context_len=5000).ms_per_kv_token == pytest.approx(1e-6, rel=0.05)
    assert 5032 <= method.longest < 5100
    assert not method.sequences


def test_what_sequences_share_is_no_price_of_each_token() -> None:
    """Attention over one sequence's context takes 1 ms whatever it reads; 64 take no longer, but for their bytes."""
    method = TimedMethod(lambda k, n, tokens: k * (2.0 + max(1.0 if tokens > 64 * n else 0.0, 1e-5 * tokens)), max_num_seqs=64, max_drafts_in_all=256)
    assert method.measure(budget_s=100, context_len=4096).ms_per_kv_token == pytest.approx(1e-5, rel=0.05)


def test_context_is_as_long_as_there_is_time_for() -> None:
    method = TimedMethod(linear, max_num_seqs=1)
    method.catch_up_s = 0.001
    assert method.measure(budget_s=2.0, context_len=100_000).ms_per_kv_token == pytest.approx(1e-6, rel=0.05)
    assert 256 <= method.longest <= 2048
    assert method.now_s < 2.5


def test_a_difference_within_the_noise_is_none() -> None:
    noise = iter([0.0, 0.6, 0.2, 0.9, 0.4] * 1000)
    assert TimedMethod(lambda k, n, tokens: 5.0 + next(noise) + 1e-5 * tokens).measure(100, context_len=4000).ms_per_kv_token == 0.0


@pytest.mark.parametrize("budget_s", [0.0, 0.4])
def test_it_stops_within_its_time_with_one_sequence_at_least(budget_s: float) -> None:
    method = TimedMethod(lambda k, n, tokens: 10.0 * k * n, max_num_seqs=64)
    costs = method.measure(budget_s, context_len=1000).costs
    assert {cost.num_sequences for cost in costs} == {1}
    assert {1, 2, 4} <= {cost.num_draft_tokens for cost in costs}
    assert method.now_s < 0.6


def test_a_few_sequences_of_a_slow_method_are_better_than_many_k() -> None:
    method = TimedMethod(lambda k, n, tokens: 5.0 * k, max_num_drafts=8, max_num_seqs=64)
    costs = method.measure(budget_s=3.0).costs
    assert len({cost.num_sequences for cost in costs}) > 2
    assert len(costs) < 7 * 8


@pytest.mark.parametrize(("max_drafts_in_all", "expected"), [(8, {1, 2}), (9, {1, 2}), (3, set())])
def test_without_blocks_for_more_it_keeps_what_it_has(max_drafts_in_all: int, expected: set[int]) -> None:
    profile = TimedMethod(linear, max_drafts_in_all=max_drafts_in_all).measure(budget_s=100, context_len=1000)
    assert {cost.num_sequences for cost in profile.costs} == expected
    assert (profile.ms_per_kv_token > 0) == bool(expected)


def test_real_methods() -> None:
    costs = measure_draft_cost(Ngram(2, 4, max_num_drafts=1, max_num_seqs=64), budget_s=0, chunk=64).costs
    assert [(cost.num_draft_tokens, cost.num_sequences) for cost in costs] == [(1, 1)]
    model = tiny_model()
    forward = EagerForward(ModelRunner(model, KVCache(model.config, 16, model.dtype)))
    method = DraftModel(model, forward, num_blocks=16, max_num_drafts=2, max_num_seqs=2)
    profile = measure_draft_cost(method, budget_s=0.3, chunk=16, context_len=100)
    assert {(cost.num_draft_tokens, cost.num_sequences) for cost in profile.costs} >= {(1, 1), (2, 1)}
    assert profile.ms_per_kv_token >= 0
    method.check_integrity()
    assert method.num_free_blocks == 16


def test_what_only_a_first_call_takes_is_no_part_of_the_time() -> None:
    """A compiler's seconds are behind a method's first call, or the first one of each size."""
    method = TimedMethod(lambda k, n, tokens: 0.5 * k, max_num_seqs=256, max_drafts_in_all=1024)
    seen: set[int] = set()
    propose = method.propose

    def compile_first(asks: list[Ask]) -> list[Drafts]:
        method.now_s += 5.0 if not seen else 0.1 if len(asks) not in seen else 0.0
        seen.add(len(asks))
        return propose(asks)

    method.propose = compile_first  # type: ignore[method-assign]
    costs = method.measure(budget_s=3.0).costs
    assert {cost.num_sequences for cost in costs} == {2**power for power in range(9)}
    assert all(cost.draft_ms == pytest.approx(0.5 * cost.num_draft_tokens) for cost in costs)


def test_a_measured_call_is_one_batch_behind_its_commits() -> None:
    """As many passes as drafts, over all sequences at once, and one token or two of each that have no KV yet; prompts are computed before."""
    model = tiny_model()
    forward = EagerForward(ModelRunner(model, KVCache(model.config, 400, model.dtype)))
    method = DraftModel(model, forward, num_blocks=400, max_num_drafts=4, max_num_seqs=8)
    calls: list[tuple[int, int, int, int, int]] = []
    counts, propose, append, num_appended = forward.counts, method.propose, method.append, 0

    def counting_append(seq_id: int, token_ids: Sequence[int]) -> None:
        nonlocal num_appended
        num_appended += len(token_ids)
        append(seq_id, token_ids)

    def counting_propose(asks: Sequence[Ask]) -> list[Drafts]:
        nonlocal num_appended
        before = counts.num_eager_passes, counts.num_tokens
        drafts = propose(asks)
        calls.append((len(asks), asks[0].num_drafts, counts.num_eager_passes - before[0], counts.num_tokens - before[1], num_appended))
        num_appended = 0
        return drafts

    method.append, method.propose = counting_append, counting_propose  # type: ignore[method-assign]
    profile = measure_draft_cost(method, budget_s=20, chunk=64)
    assert {(cost.num_sequences, cost.num_draft_tokens) for cost in profile.costs} == {(n, k) for n in (1, 2, 4, 8) for k in (1, 2, 3, 4)}
    _, *measured = calls
    assert len(measured) >= 4 * 4 * 6
    for n, k, num_passes, num_tokens, _ in measured:
        assert num_passes == k
        assert n * k <= num_tokens <= n * (k + 1)
    for (n, k, *_, num_committed), (n_before, k_before, *_) in itertools.pairwise(reversed(measured)):
        if (n, k) == (n_before, k_before):
            assert num_committed == n * (1 + k // 2)
    method.check_integrity()
    assert method.num_free_blocks == 400


class ChunkMethod(TimedMethod):
    """Background work takes ms_per_token, in chunks as large as are asked for."""

    def __init__(self, ms_per_token: float, **options: int) -> None:
        super().__init__(lambda k, n, tokens: 1.0 * k, **options)
        self.ms_per_token = ms_per_token
        self.num_left = 0

    def open(self, seq_id: int, request: DraftOpen) -> None:
        super().open(seq_id, request)
        self.num_left += len(request.token_ids) - 1

    def close(self, seq_id: int) -> None:
        super().close(seq_id)
        self.num_left = self.num_left if self.sequences else 0

    def catch_up(self, budget: int) -> int:
        computed = min(budget, self.num_left)
        self.num_left -= computed
        self.now_s += computed * self.ms_per_token / 1e3
        return computed


@pytest.mark.parametrize(
    ("ms_per_token", "most", "expected"),
    [
        (0.005, 16384, 512),  # 2.6 ms, but 5.1 for twice as many: the largest that fits into 4 ms
        (0.005, 256, 256),  # as configured
        (0.0001, 16384, 16384),
        (1.0, 256, 32),  # too slow in any case: the smallest one
        (0.005, 16, 16),
    ],
)
def test_chunks_are_as_large_as_replies_can_wait_for(ms_per_token: float, most: int, expected: int) -> None:
    method = ChunkMethod(ms_per_token)
    profile = measure_draft_cost(method, budget_s=100, chunk=most, clock=method.clock)
    assert profile.chunk == expected
    assert not method.sequences


def test_no_background_work_has_no_chunks() -> None:
    assert TimedMethod(linear).measure(budget_s=100).chunk == 0


@pytest.mark.parametrize(("floor_ms", "expected"), [(0.0, 256), (8.0, 128), (30.0, 512)])
def test_a_chunk_is_no_smaller_than_what_takes_as_long(floor_ms: float, expected: int) -> None:
    """Launches take floor_ms of any chunk: with 32 tokens it is as long as with all that are done in a quarter more."""

    class FlooredMethod(ChunkMethod):
        def catch_up(self, budget: int) -> int:
            computed = super().catch_up(budget)
            self.now_s += floor_ms / 1e3 if computed else 0.0
            return computed

    method = FlooredMethod(0.01, max_num_seqs=4)
    profile = measure_draft_cost(method, budget_s=100, chunk=1024, clock=method.clock)
    assert profile.chunk == expected
    assert profile.chunk_ms == pytest.approx(floor_ms + expected * 0.01)
