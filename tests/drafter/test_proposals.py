"""Drafts for the ratio test: drawn from what is sent with them, with noise that nothing else uses; whatever runs the model."""

import numpy as np
import pytest

from drafter_svc.draft_model import DraftModel
from drafter_svc.drawn import wanted_candidates
from drafter_svc.forward import EagerForward
from drafter_svc.method import Ask, Drafts
from drafter_svc.parallel import ParallelForward
from specwire.config import DrafterConfig
from specwire.engine.kv_cache import KVCache
from specwire.engine.runner import ModelRunner
from specwire.proposals import MAX_CANDIDATES, what_is_wrong
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.draft_models import GREEDY, HOT, MODEL, tokens
from tests.drafter.helpers import open_request
from tests.drafter.target import VOCAB_SIZE, target_logits

TEXT = tokens(20)
K = 3


def make(num_candidates: int, *, parallel: bool = False, sharpness: float = 1.0) -> DraftModel:
    forward = EagerForward(ModelRunner(MODEL, KVCache(MODEL.config, 256, MODEL.dtype)), num_candidates=num_candidates)
    return DraftModel(
        MODEL,
        ParallelForward(forward, VOCAB_SIZE - 1) if parallel else forward,
        num_blocks=256,
        max_num_drafts=K,
        max_num_seqs=100,
        feeds_drafts=not parallel,
        sharpness=sharpness,
    )


def propose(method: DraftModel, sampling: SamplingParams, num_keys: int = 60) -> list[Drafts]:
    for seq_id in range(num_keys):
        method.open(seq_id, open_request(TEXT, slot=seq_id, sampling=sampling, noise_key=seq_id))
    while method.catch_up(256):
        pass
    return method.propose([Ask(seq_id, 1 + seq_id % K) for seq_id in range(num_keys)])


@pytest.mark.parametrize("parallel", [False, True], ids=["one by one", "in one pass"])
def test_candidates_are_the_likeliest_tokens_at_the_drafts_temperature(*, parallel: bool) -> None:
    answers = propose(make(8, parallel=parallel, sharpness=2.0), HOT)
    logits = target_logits(MODEL, TEXT)[-1].double() * 2.0 / HOT.temperature
    best = logits.topk(8)
    drawn = set()
    for number, answer in enumerate(answers):
        assert answer.proposals is not None
        assert answer.proposals.token_ids.shape == (len(answer.token_ids), 8) == (1 + number % K, 8)
        assert what_is_wrong(answer.token_ids, answer.proposals, VOCAB_SIZE) == ""
        np.testing.assert_array_equal(answer.proposals.token_ids[0], best.indices)
        np.testing.assert_allclose(answer.proposals.probs[0], best.values.softmax(0), rtol=1e-4)
        drawn.add(answer.token_ids[0])
    assert len(drawn) > 2, "nothing was drawn"


def test_noise_is_not_the_targets() -> None:
    private, shared = propose(make(VOCAB_SIZE), HOT), propose(make(0), HOT)
    assert all(answer.proposals is None for answer in shared)
    assert [answer.token_ids[0] for answer in private] != [answer.token_ids[0] for answer in shared]
    assert private[:5] != propose(make(VOCAB_SIZE), HOT)[5:10]
    again = propose(make(VOCAB_SIZE), HOT)
    assert [answer.token_ids for answer in private] == [answer.token_ids for answer in again]


def test_greedy_drafts_have_no_other_candidate() -> None:
    (answer,) = propose(make(4), GREEDY, num_keys=1)
    (plain,) = propose(make(0), GREEDY, num_keys=1)
    assert answer.token_ids == plain.token_ids
    assert answer.proposals is not None
    assert answer.proposals.probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert answer.scores == pytest.approx(plain.scores)


def config(device: str = "cpu", **values: object) -> DrafterConfig:
    spec = {"method": "draft_model", "model": "nowhere", "rejection_sample_method": "probabilistic"} | values
    return DrafterConfig(device=device, speculative_config=SpeculativeConfig.from_dict(spec))


def test_who_draws_with_private_noise() -> None:
    assert wanted_candidates(config()) == MAX_CANDIDATES
    assert wanted_candidates(config(draft_sample_method="greedy")) == 0
    assert wanted_candidates(config("cuda", draft_sample_method="greedy")) == 0
    assert wanted_candidates(config("cuda", rejection_sample_method="strict")) == 0
