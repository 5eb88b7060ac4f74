"""Drafting on the device: padding, chunks, both kinds of kernels, and what a call waits for."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specwire.engine.graphs import draft_runner
from specwire.engine.graphs.backends import TorchBackend, TritonBackend
from specwire.engine.graphs.draft_runner import DraftRunner, DraftTokens
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from tests.verifier.harness import tiny_config, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SEQS, K, MAX_LEN, CHUNK = 5, 4, 128, 24
BLOCKS = MAX_LEN // 16
VOCAB = 61


def poisoned_cache(model: Decoder) -> KVCache:
    cache = KVCache(model.config, NUM_SEQS * BLOCKS + 1, model.dtype, model.device)
    for layer in cache.layers:
        layer.fill_(float("nan"))
    return cache


def make(model: Decoder, cache: KVCache | None = None, **options: object) -> DraftRunner:
    sizes: dict = {"max_num_seqs": NUM_SEQS, "max_num_drafts": K, "max_model_len": MAX_LEN, "max_chunk": CHUNK}
    return DraftRunner(model, cache or poisoned_cache(model), **(sizes | options))


def propose(runner: DraftRunner, rows: Sequence[DraftRow]) -> list[DraftTokens]:
    return runner.launch(rows)()


def table(slot: int) -> list[int]:
    """Each slot owns a fixed row of blocks; the very last one is nobody's."""
    return list(range(slot * BLOCKS, (slot + 1) * BLOCKS))


def run_script(
    runner: DraftRunner, seed: int, num_calls: int, *, num_slots: int = NUM_SEQS, k: int = K, followed: list[list[DraftTokens]] | None = None
) -> list[list[DraftTokens]]:
    """Random sequences in all slots, and calls over some of them that accept any part of the drafts, or of those `followed`; what was drafted."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 5, 16, 40][:num_slots]))] for _ in range(num_slots)]
    for slot in range(num_slots):
        runner.open(slot, DraftSampling(rng.choice([0.0, 0.6, 1.2]), rng.getrandbits(64), slot % 2))
    runner.compute([DraftRow(slot, 0, text[:-1], table(slot)) for slot, text in enumerate(texts)])
    known = [len(text) - 1 for text in texts]  # tokens with KV
    answers = []
    for call in range(num_calls):
        slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
        asked = {slot: min(rng.randint(1, k), MAX_LEN - len(texts[slot])) for slot in slots}
        rows = [DraftRow(slot, known[slot], texts[slot][known[slot] :], table(slot), asked[slot]) for slot in slots if asked[slot] > 0]
        drafts = propose(runner, rows)
        answers.append(drafts)
        for row, (own_ids, *_), (token_ids, *_) in zip(rows, drafts, followed[call] if followed else drafts, strict=True):
            text, num_kept = texts[row.slot], rng.randint(0, len(token_ids))
            num_equal = next((i for i, pair in enumerate(zip(own_ids, token_ids, strict=True)) if pair[0] != pair[1]), len(own_ids))
            known[row.slot] = len(text) + min(num_kept, num_equal, len(token_ids) - 1)
            text += [*token_ids[:num_kept], *(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 1, 1, 7])))]
            del text[MAX_LEN:]
            known[row.slot] = min(known[row.slot], len(text) - 1)
    return answers


def test_a_script_that_follows_other_drafts() -> None:
    """As on a GPU, where drafts of two kinds of kernels may differ."""
    model = tiny_model()
    expected = run_script(make(model), 6, 12)
    assert_same(run_script(make(model), 6, 12, followed=expected), expected)
    wrong = [[DraftTokens([9] * len(token_ids), probs) for token_ids, probs, _ in drafts] for drafts in expected]
    first, second = (run_script(make(model, max_chunk=chunk), 6, 12, followed=wrong) for chunk in (CHUNK, 100))
    assert_same(first, second)
    assert first[1:] != expected[1:]


def assert_same(ours: Sequence[Sequence[DraftTokens]], others: Sequence[Sequence[DraftTokens]]) -> None:
    for drafts, expected in zip(ours, others, strict=True):
        for (token_ids, probs, _), (other_ids, other_probs, _) in zip(drafts, expected, strict=True):
            assert token_ids == other_ids
            assert probs == pytest.approx(other_probs, abs=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows compute on memory that nobody wrote
def test_kernels_equal_their_twins() -> None:
    model = tiny_model(head_dim=16)
    sizes = {"max_num_seqs": 2, "max_num_drafts": 2, "max_chunk": 4}
    runners = [make(model, **sizes), make(model, **sizes, backend=TritonBackend(model.config, model.device))]
    answers = [run_script(runner, 4, 2, num_slots=2, k=2) for runner in runners]
    assert_same(*answers)
    assert {len(drafts) for drafts in answers[0]} == {1, 2}
    assert {len(token_ids) for drafts in answers[0] for token_ids, *_ in drafts} == {1, 2}


def test_joined_passes_draft_the_same() -> None:
    """Of one row; several go on pass by pass, and so does one that wants fewer drafts."""
    runners = [make(tiny_model()), make(tiny_model(), joins_passes=True)]
    for num_slots in (1, 3):
        assert_same(*(run_script(runner, 7, 10, num_slots=num_slots) for runner in runners))
    separate, joined = (runner.counts for runner in runners)
    assert joined == separate
    assert joined.num_graph_passes > 30


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_equal_the_same_kernels_one_by_one(dtype: torch.dtype) -> None:
    model = dummy_model(tiny_config(head_dim=64), dtype, std=0.4, device="cuda")
    runners = [make(model), make(model, use_graphs=False), make(model, joins_passes=True)]
    for runner in runners:
        runner.capture()
    assert runners[2].num_graphs > runners[0].num_graphs > 8
    expected = run_script(runners[1], 5, 40)
    for runner in (runners[0], runners[2]):
        assert_same(run_script(runner, 5, 40), expected)
    assert_same(*(run_script(runner, 5, 40, num_slots=1) for runner in runners[1:]))
    if dtype is torch.float32:
        # Twins sum in another order: a near tie may fall the other way.
        expected = run_script(make(model, backend=TorchBackend(model.config, model.device, dtype, 16), use_graphs=False), 6, 40)
        answers = run_script(runners[0], 6, 40, followed=expected)
        pairs = [pair for call in zip(answers, expected, strict=True) for pair in zip(*call, strict=True)]
        equal = [(ours.probs, other.probs) for ours, other in pairs if ours.token_ids == other.token_ids]
        assert len(equal) >= 0.95 * len(pairs) > 50
        assert all(probs == pytest.approx(other_probs, abs=0.01) for probs, other_probs in equal)


def test_padding_writes_to_the_scratch_block_alone() -> None:
    """Of every padded size of first passes; all but the rows' own block stay poisoned."""
    model = tiny_model()
    cache = poisoned_cache(model)
    runner = make(model, cache)
    runner.capture()
    for slot in range(NUM_SEQS):
        runner.open(slot, DraftSampling(1.0, slot, 0))
    for num_rows in range(1, NUM_SEQS + 1):
        for num_tokens in range(1, K + 2):
            for layer in cache.layers:
                layer.fill_(float("nan"))
            propose(runner, [DraftRow(slot, 0, [5] * num_tokens, table(slot), 1 + slot % K) for slot in range(num_rows)])
            written = [slot * BLOCKS for slot in range(num_rows)]
            others = [block for block in range(NUM_SEQS * BLOCKS + 1) if block not in written]
            for layer in cache.layers:
                assert layer[others].isnan().all()
                for slot, block in enumerate(written):
                    count = num_tokens + slot % K  # the last draft is never fed
                    assert not layer[block, :count].isnan().any()
                    assert layer[block, count:].isnan().all()


def test_one_pass_a_draft_and_the_smallest_sizes() -> None:
    runner = make(tiny_model())
    for slot in range(NUM_SEQS):
        runner.open(slot, DraftSampling(0.0, slot, 0))
    rows = [DraftRow(slot, 0, [5, 6], table(slot), num_drafts) for slot, num_drafts in enumerate((1, 4, 2, 1, 1))]
    drafts = propose(runner, rows)
    assert [len(token_ids) for token_ids, *_ in drafts] == [1, 4, 2, 1, 1]
    counts = runner.counts
    # Ten tokens in a pass of sixteen; two rows, then one twice.
    assert (counts.num_graph_passes, counts.num_eager_passes) == (4, 0)
    assert (counts.num_tokens, counts.num_padded_tokens) == (10 + 2 + 1 + 1, 16 + 2 + 1 + 1)
    assert propose(runner, []) == []
    # Alike for each row alone, in another order.
    assert [propose(runner, [row])[0].token_ids for row in reversed(rows)] == [token_ids for token_ids, *_ in reversed(drafts)]


@pytest.mark.parametrize("lengths", [[100], [24, 24], [23, 2, 60], [1, 1, 1], [90, 90, 90, 90, 90]])
def test_chunks_are_divided_and_counted(lengths: list[int]) -> None:
    """Drafts after tokens that came in chunks are those after the same tokens at once."""
    model, rng = tiny_model(), random.Random(4)
    texts = [[rng.randrange(3, VOCAB) for _ in range(length + 1)] for length in lengths]
    found = []
    for chunk in (CHUNK, 1000):
        runner = make(model, max_chunk=chunk)
        for slot in range(len(texts)):
            runner.open(slot, DraftSampling(0.8, slot, 0))
        runner.compute([DraftRow(slot, 0, text[:-1], table(slot)) for slot, text in enumerate(texts)])
        assert runner.counts.num_eager_passes == -(-sum(lengths) // max(chunk, NUM_SEQS * (K + 1)))
        assert runner.counts.num_tokens == sum(lengths)
        found.append(propose(runner, [DraftRow(slot, len(text) - 1, text[-1:], table(slot), 3) for slot, text in enumerate(texts)]))
    assert_same(found[:1], found[1:])


def test_rows_longer_than_a_graph_takes_are_computed_before() -> None:
    model = tiny_model()
    text = [5 + index % 50 for index in range(60)]
    found = []
    for num_computed in (0, 20, 57):
        runner = make(model)
        runner.open(0, DraftSampling(0.8, 9, 0))
        runner.open(1, DraftSampling(0.8, 9, 0))
        if num_computed:
            runner.compute([DraftRow(0, 0, text[:num_computed], table(0))])
        long, short = propose(runner, [DraftRow(0, num_computed, text[num_computed:], table(0), 4), DraftRow(1, 0, text[:3], table(1), 2)])
        found.append([long])
        assert len(short.token_ids) == 2
        assert runner.counts.num_graph_passes == 4
    assert_same(found[:1] * 2, found[1:])


def test_a_slot_that_is_opened_again_begins_with_an_empty_table() -> None:
    model = tiny_model()
    runner, fresh = make(model), make(model)
    runner.open(0, DraftSampling(0.0, 1, 0))
    propose(runner, [DraftRow(0, 0, [5, 6, 7], [3], 2)])
    runner.open(0, DraftSampling(1.0, 2, 1))
    fresh.open(2, DraftSampling(1.0, 2, 1))
    assert_same([propose(runner, [DraftRow(0, 0, [9, 8], [1], 4)])], [propose(fresh, [DraftRow(2, 0, [9, 8], [6], 4)])])


def test_bad_numbers_stay_in_their_row() -> None:
    model = tiny_model()
    model._embedding[60] = float("nan")
    runner = make(model)
    runner.open(0, DraftSampling(1.0, 1, 0))
    runner.open(1, DraftSampling(1.0, 1, 0))
    bad, good = propose(runner, [DraftRow(0, 0, [60], table(0), 3), DraftRow(1, 0, [5], table(1), 3)])
    assert bad == DraftTokens([0, 0, 0], [0.0, 0.0, 0.0])
    assert all(prob > 0 for prob in good.probs)


def test_slots_and_rows_that_cannot_be() -> None:
    runner = make(tiny_model())
    with pytest.raises(AssertionError, match="slot 5 of 5"):
        runner.open(5, DraftSampling(1.0, 1, 0))
    with pytest.raises(AssertionError, match="no drafts wanted"):
        propose(runner, [DraftRow(0, 0, [5], table(0))])


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_a_first_pass_has_the_rows_of_all_passes_after_it(num_drafts: int) -> None:
    for num_seqs in range(1, 150):
        limits = RoundLimits(num_seqs, num_drafts, num_seqs * (num_drafts + 1), MAX_LEN)
        first, steps = limits.graph_sizes(), replace(limits, max_num_draft_tokens=0).graph_sizes()
        for num_rows in range(1, num_seqs + 1):
            num_first_rows = min(first[bisect_left(first, num_rows)], num_seqs)
            assert num_rows <= steps[bisect_left(steps, num_rows)] <= num_first_rows


def test_each_pass_gets_its_own_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is captured run again in place of a graph's replay."""
    monkeypatch.setattr(draft_runner, "capture_graphs", lambda runs, _: [SimpleNamespace(replay=run) for run in runs])
    model = tiny_model()
    with_graphs = make(model)
    with_graphs._use_graphs = True
    with_graphs.capture()
    assert with_graphs.num_graphs == len(with_graphs._first) + len(with_graphs._steps) > 5
    assert_same(run_script(with_graphs, 5, 10), run_script(make(model), 5, 10))
