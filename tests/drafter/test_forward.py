"""Both ways to run a draft model give the same drafts and scores, whatever happens to the sequences."""

import random
from dataclasses import dataclass, field

import pytest

from drafter_svc.draft_model import DraftModel
from drafter_svc.forward import DraftForward, EagerForward, make_forward
from drafter_svc.method import Ask
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.runner import ModelRunner
from specwire.messages import RowStatus
from specwire.sampling_params import SamplingParams
from tests.drafter.helpers import open_request
from tests.drafter.target import VOCAB_SIZE, tiny_model

MODEL = tiny_model(max_position_embeddings=160)
NUM_SEQS, NUM_BLOCKS, K = 7, 24, 5
SAMPLING = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.5, 1.0, 1.5)]


def poisoned_cache(model: Decoder) -> KVCache:
    cache = KVCache(model.config, NUM_BLOCKS, model.dtype)
    for layer in cache.layers:
        layer.fill_(float("nan"))
    return cache


def make(forward: DraftForward, *, greedy: bool) -> DraftModel:
    return DraftModel(MODEL, forward, num_blocks=NUM_BLOCKS, max_num_drafts=K, max_num_seqs=NUM_SEQS, greedy=greedy)


def device_forward(**options: object) -> DraftRunner:
    sizes: dict = {"max_num_seqs": NUM_SEQS, "max_num_drafts": K, "max_model_len": 160, "max_chunk": 30}
    return DraftRunner(MODEL, poisoned_cache(MODEL), **(sizes | options))


@dataclass
class Both:
    """Two drafters that are told the same."""

    rng: random.Random
    methods: list[DraftModel]
    lengths: dict[int, int] = field(default_factory=dict)
    drafted: dict[int, list[int]] = field(default_factory=dict)
    num_drafts: int = 0
    num_calls: int = 0
    statuses: set[RowStatus] = field(default_factory=set)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(count)]

    def open(self, seq_id: int) -> None:
        token_ids = self.tokens(self.rng.choice((0, 1, 5, 16, 40, 90)))
        request = open_request(token_ids, sampling=self.rng.choice(SAMPLING), noise_key=self.rng.getrandbits(64), choice=self.rng.randrange(3))
        for method in self.methods:
            method.open(seq_id, request)
        self.lengths[seq_id] = len(token_ids)

    def close(self, seq_id: int) -> None:
        for method in self.methods:
            method.close(seq_id)
        del self.lengths[seq_id]
        self.drafted.pop(seq_id, None)

    def commit(self, seq_id: int) -> None:
        """Any part of the drafts, none included, and more: one token mostly, as many as a time without drafts leaves at times."""
        drafts = self.drafted.pop(seq_id, [])
        token_ids = drafts[: self.rng.randrange(len(drafts) + 1)] + self.tokens(self.rng.choice((1, 1, 1, 4, 9, 25)))
        for method in self.methods:
            method.append(seq_id, token_ids)
        self.lengths[seq_id] += len(token_ids)

    def propose(self) -> None:
        asks = [Ask(seq_id, self.rng.randrange(K + 2)) for seq_id in self.rng.sample(sorted(self.lengths), self.rng.randrange(len(self.lengths) + 1))]
        answers = [method.propose(asks) for method in self.methods]
        self.num_calls += 1
        for ask, ours, other in zip(asks, *answers, strict=True):
            assert (ours.status, ours.token_ids) == (other.status, other.token_ids), ask
            assert ours.scores == pytest.approx(other.scores, abs=1e-5)
            self.drafted[ask.seq_id] = ours.token_ids
            self.num_drafts += len(ours.token_ids)
            self.statuses.add(ours.status)

    def catch_up(self) -> None:
        budget = self.rng.choice((7, 30, 64, 200))
        assert len({method.catch_up(budget) for method in self.methods}) == 1


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_operations(seed: int, greedy: bool) -> None:
    forwards: list[DraftForward] = [EagerForward(ModelRunner(MODEL, poisoned_cache(MODEL))), device_forward()]
    both = Both(random.Random(seed), [make(forward, greedy=greedy) for forward in forwards])
    for _ in range(250):
        action = both.rng.choice(("open", "open", "close", "commit", "commit", "propose", "propose", "propose", "catch_up"))
        seq_id = both.rng.randrange(NUM_SEQS)
        if action == "open" and seq_id not in both.lengths:
            both.open(seq_id)
        elif action in ("close", "commit") and seq_id in both.lengths:
            if action == "commit" or both.rng.random() < 0.4:
                getattr(both, action)(seq_id)
        elif action in ("propose", "catch_up"):
            getattr(both, action)()
        for method in both.methods:
            method.check_integrity()
    assert both.num_drafts > 300
    assert both.statuses == {RowStatus.OK, RowStatus.CATCHING_UP, RowStatus.OUT_OF_BLOCKS}
    eager, on_device = (forward.counts for forward in forwards)
    assert eager.num_tokens == eager.num_padded_tokens == on_device.num_tokens < on_device.num_padded_tokens
    assert eager.num_graph_passes == 0 < on_device.num_eager_passes < on_device.num_graph_passes


def test_the_device_decides() -> None:
    sizes = {"max_num_seqs": 2, "max_num_drafts": 1, "max_model_len": 160, "max_chunk": 8}
    assert isinstance(make_forward(MODEL, poisoned_cache(MODEL), **sizes, use_graphs=True), EagerForward)
