"""The round runner emits what the verifier emits, token for token, whatever the composition of the rounds."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from specwire.engine.graphs import runner as runner_module
from specwire.engine.graphs.backends import TritonBackend
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams
from tests.engine.graphs.mixes import MIXES, params_of
from tests.engine.graphs.pair import LIMITS, Pair, continuations, spoilt
from tests.verifier.harness import GREEDY, poison, tiny_model

VOCAB = 61
KERNEL = [GREEDY, SamplingParams(temperature=1.0, max_tokens=None), SamplingParams(temperature=0.4, max_tokens=None)]
ASKING = [
    SamplingParams(temperature=0.9, top_k=5, max_tokens=None),
    SamplingParams(temperature=0.9, top_p=0.8, min_p=0.01, max_tokens=None),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=None),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=None),
    SamplingParams(temperature=1.0, min_tokens=5, max_tokens=None),
]


def run_random_rounds(pair: Pair, params: list[SamplingParams], rng: random.Random, num_rounds: int) -> None:
    """Opens, prefills in chunks and decodes with 0 to 8 drafts, in random order; slots are closed and used again."""
    prompts = {}
    for slot, wanted in enumerate(params):
        prompts[slot] = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 7, 16, 33, 60]))]
        pair.open(slot, prompts[slot], wanted, key=rng.getrandbits(64), choice=slot % 2)
    futures = continuations(pair.model, {slot: (prompts[slot], params[slot], pair.sequences[slot].sampling.key) for slot in prompts}, 50)
    for number in range(num_rounds):
        work = {}
        for slot in rng.sample(sorted(pair.sequences), rng.randint(1, len(pair.sequences))):
            sequence = pair.sequences[slot]
            emitted = len(sequence.tokens) - sequence.num_opened
            if sequence.num_computed < sequence.num_opened:
                work[slot] = rng.choice([1, 5, 9, 30])
            elif emitted < 40:
                num_drafts = rng.choice([0, 0, 1, 3, 5, 8])
                work[slot] = spoilt(futures[slot][emitted : emitted + num_drafts], rng, VOCAB)
        if number == num_rounds // 2:
            slot = 0
            pair.open(slot, prompts[slot], params[slot], key=pair.sequences[slot].sampling.key)
            work[slot] = 9
        if work:
            pair.launch(work, run_ahead=rng.random() < 0.8)
    pair.finish()


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_equals_the_verifier(num_in_flight):
    pair = Pair(tiny_model(), num_in_flight=num_in_flight)
    run_random_rounds(pair, KERNEL + ASKING, random.Random(num_in_flight), 40)
    assert pair.num_accepted > 40
    assert pair.num_run_ahead > 10
    counts = pair.runner.counts
    assert counts.num_eager_rounds > 0
    assert counts.num_graph_rounds > 20
    assert counts.num_rows_sampled_outside == 0
    assert counts.num_padded_tokens > counts.num_tokens


@pytest.mark.parametrize("rates", [None, (0.9, 0.7, 0.6, 0.3)])
def test_random_mixes_equal_the_verifier(rates):
    rng = random.Random(11)
    pair = Pair(tiny_model(), rates=rates)
    run_random_rounds(pair, [params_of(rng, VOCAB) for _ in range(8)], rng, 40)
    assert pair.num_accepted > 20
    assert pair.num_run_ahead > 10
    assert pair.runner.counts.num_rows_sampled_outside == 0


def test_only_bad_words_of_several_tokens_are_sampled_outside():
    """The others' rounds run ahead meanwhile."""
    words = [GREEDY.replace(bad_words_token_ids=((first, last), (9,)), logprobs=1) for first, last in [(7, 21), (30, 31)]]
    pair = Pair(tiny_model())
    run_random_rounds(pair, [*words, *ASKING[:3]], random.Random(4), 30)
    counts = pair.runner.counts
    assert 10 < counts.num_rows_sampled_outside < 60
    assert pair.num_run_ahead > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows compute on memory that nobody wrote
def test_kernels_equal_the_verifier():
    model = tiny_model(head_dim=16)
    pair = Pair(model, TritonBackend(model.config, model.device))
    run_random_rounds(pair, [KERNEL[1], MIXES[0], MIXES[4]], random.Random(1), 4)
    assert pair.num_accepted > 0
    assert pair.num_run_ahead > 0


def test_rows_without_drafts_wait_for_nothing_outside():
    pair = Pair(tiny_model())
    for slot in range(3):
        pair.open(slot, [5, 6, 7 + slot], KERNEL[slot])
    pair.launch({0: 9, 1: 9, 2: 9})
    for _ in range(20):
        pair.launch({0: [], 1: [], 2: []})
    pair.finish()
    assert pair.num_run_ahead == 60
    assert pair.runner.counts.num_rows_sampled_outside == 0


def test_a_slot_that_goes_bad_stays_so_and_spoils_no_other():
    model = tiny_model()
    future = continuations(model, {0: ([5, 6, 7], GREEDY, 7)}, 3)[0]
    poison(model, 60)
    pair = Pair(model)
    pair.open(0, [5, 60, 7], GREEDY)
    pair.open(1, [5, 6, 7], GREEDY)
    pair.launch({0: 100, 1: 100})
    pair.finish()
    rows = [RoundRow(slot, 3, [0], 0, list(pair.blocks.block_table(slot)), pair.sequences[slot].sampling, from_device=True) for slot in (0, 1)]
    before = [layer.clone() for layer in pair.cache.layers]
    bad, good = pair.runner.launch(rows).results()
    assert bad.is_bad
    assert bad.token_ids == ()
    assert list(good.token_ids) == future[1:2]
    own = pair.blocks.block_table(0)[0]
    assert all(torch.equal(layer[own].nan_to_num(9), kept[own].nan_to_num(9)) for layer, kept in zip(pair.cache.layers, before, strict=True))
    pair.open(0, [5, 6, 7], GREEDY)  # the slot's next sequence is well
    pair.launch({0: 100})
    pair.launch({0: []})
    pair.finish()


def test_padding_writes_to_the_scratch_block_alone():
    """Of every padded size; a sentinel fills the last block that sequences may own."""
    model = tiny_model()
    cache = KVCache(model.config, 4, torch.float32)
    runner = RoundRunner(model, cache, LIMITS, num_in_flight=1)
    sampling = SlotSampling(GREEDY, key=1, vocab_size=VOCAB, token_ids=[5], num_prompt_tokens=1)
    sizes = runner.graph_sizes
    assert sizes[-1] == LIMITS.max_graph_tokens == 72
    for num_tokens in range(1, 10):
        for layer in cache.layers:
            layer.fill_(float("nan"))
        runner.open(0, sampling)
        runner.launch([RoundRow(0, 0, [5] * num_tokens, 0, [1], sampling)]).results()
        for layer in cache.layers:
            assert layer[[0, 2, 3]].isnan().all()
            assert layer[1, :num_tokens].isfinite().all()
            assert layer[1, num_tokens:].isnan().all()
            is_padded = num_tokens not in sizes
            assert bool(layer[cache.scratch_block].isfinite().any()) == is_padded


def test_graph_sizes_leave_an_eighth_of_padding_at_most():
    for limits in (RoundLimits(256, 8, 16384, 4096), RoundLimits(1, 0, 16, 16), RoundLimits(3, 2, 100, 16), RoundLimits(64, 8, 128, 256)):
        sizes = limits.graph_sizes()
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == limits.max_graph_tokens
        assert all(after - before <= max(8, before / 7) for before, after in itertools.pairwise(sizes))


def test_impossible_rounds_are_caught():
    model = tiny_model()
    runner = RoundRunner(model, KVCache(model.config, 4, torch.float32), LIMITS, num_in_flight=1)
    sampling = SlotSampling(GREEDY, key=1, vocab_size=VOCAB, token_ids=[5], num_prompt_tokens=1)
    runner.open(0, sampling)
    row = RoundRow(0, 0, [5], 0, [1], sampling)
    for rows in ([], [row, row], [RoundRow(0, 0, [5, 6], 2, [1], sampling)], [RoundRow(0, 0, [5, 6], 0, [1], sampling, from_device=True)]):
        with pytest.raises(AssertionError):
            runner.launch(rows)
    first = runner.launch([row])
    with pytest.raises(AssertionError, match="rounds in flight"):
        runner.launch([row])
    assert first.is_done()
    assert len(first.results()) == 1
    with pytest.raises(AssertionError, match="read once"):
        first.results()


class LostDevice:
    """In place of a round's event."""

    def synchronize(self) -> None:
        raise RuntimeError("device lost")


def test_a_round_that_failed_holds_no_buffer_of_later_ones():
    pair = Pair(tiny_model())
    pair.open(0, [5, 6, 7], GREEDY)
    row = RoundRow(0, 0, [5, 6, 7], 0, [0], pair.sequences[0].sampling)
    for _ in range(3):
        launched = pair.runner.launch([row])
        launched._arrived = LostDevice()
        with pytest.raises(RuntimeError, match="device lost"):
            launched.results()


def test_each_size_gets_its_own_graph(monkeypatch):
    """With what is captured run again in place of a graph's replay."""
    monkeypatch.setattr(runner_module, "capture_graphs", lambda runs, _: [SimpleNamespace(replay=run) for run in runs])
    pair = Pair(tiny_model())
    pair.runner._use_graphs = True
    pair.runner.capture()
    assert pair.runner.num_graphs == len(pair.runner.graph_sizes) > 10
    run_random_rounds(pair, KERNEL, random.Random(5), 12)
