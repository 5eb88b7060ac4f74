"""A draft model that predicts all drafts in one pass over mask tokens."""

import json
from pathlib import Path

import pytest

from drafter_svc.draft_model import DraftModel
from drafter_svc.forward import EagerForward
from drafter_svc.load import load_draft_model
from drafter_svc.method import Ask
from drafter_svc.parallel import ParallelForward, read_mask_token_id
from specwire.config import DrafterConfig
from specwire.engine.kv_cache import KVCache
from specwire.engine.runner import ModelRunner
from specwire.errors import InvalidArgumentError
from specwire.messages import RowStatus
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.draft_models import GREEDY, MODEL, SAMPLED, tokens
from tests.drafter.helpers import open_request
from tests.drafter.target import VOCAB_SIZE, target_logits
from tests.engine.tiny_models import save_tiny_model
from tests.heads.reference import Noise

MASK = VOCAB_SIZE - 1


def make(num_blocks: int = 64) -> DraftModel:
    cache = KVCache(MODEL.config, num_blocks, MODEL.dtype)
    forward = ParallelForward(EagerForward(ModelRunner(MODEL, cache)), MASK)
    return DraftModel(MODEL, forward, num_blocks=num_blocks, max_num_drafts=5, feeds_drafts=False)


def expected(known: list[int], num_drafts: int, noise: Noise) -> list[int]:
    """One pass without a cache."""
    logits = target_logits(MODEL, known + [MASK] * (num_drafts - 1))[len(known) - 1 :]
    return [noise.draw(row, len(known) + position, VOCAB_SIZE) for position, row in enumerate(logits)]


def test_drafts_are_those_of_one_pass_whatever_was_drafted_before() -> None:
    method = make()
    initial = method.num_free_blocks
    texts = [tokens(90, seed) for seed in range(3)]
    known = [1, 17, 40]
    noises = [Noise(0.0, 5), Noise(0.8, 6, 1), Noise(0.8, 2**63 + 7)]
    for seq_id, (text, noise) in enumerate(zip(texts, noises, strict=True)):
        sampling = SAMPLED if noise.temperature else GREEDY
        method.open(seq_id, open_request(text[: known[seq_id]], sampling=sampling, noise_key=noise.key, choice=noise.choice))
    while method.catch_up(16):
        pass
    for num_accepted, num_drafts in ((1, 5), (3, 1), (6, 4), (2, 5), (20, 3), (1, 5)):
        drafted = method.propose([Ask(seq_id, num_drafts) for seq_id in range(3)])
        for seq_id, drafts in enumerate(drafted):
            text = texts[seq_id][: known[seq_id]]
            assert drafts.status is RowStatus.OK
            assert drafts.token_ids == expected(text, num_drafts, noises[seq_id])
            assert len(drafts.scores) == num_drafts
        for seq_id in range(3):
            # What was drafted is taken, where it fits: its KV is that of mask tokens, and must not be kept.
            texts[seq_id][known[seq_id] : known[seq_id] + num_drafts] = drafted[seq_id].token_ids
            method.append(seq_id, texts[seq_id][known[seq_id] : known[seq_id] + num_accepted])
            known[seq_id] += num_accepted
        while method.catch_up(16):
            pass
        method.check_integrity()
    for seq_id in range(3):
        method.close(seq_id)
    assert method.num_free_blocks == initial
    # Once more, from what the prefix cache has of them: no mask token's KV is among it.
    for seq_id, noise in enumerate(noises):
        sampling = SAMPLED if noise.temperature else GREEDY
        method.open(seq_id, open_request(texts[seq_id][: known[seq_id]], sampling=sampling, noise_key=noise.key, choice=noise.choice))
    before = method.counts.num_tokens
    for seq_id, drafts in enumerate(method.propose([Ask(seq_id, 5) for seq_id in range(3)])):
        assert drafts.token_ids == expected(texts[seq_id][: known[seq_id]], 5, noises[seq_id])
    assert method.counts.num_tokens - before < 3 * (16 + 5)


def test_the_mask_token_is_read_from_the_folder(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    spec = SpeculativeConfig(method="draft_model", model=str(tmp_path), parallel_drafting=True)
    with pytest.raises(InvalidArgumentError, match="none of mask_token_id, pard_token, ptd_token_id: it was not trained for that"):
        load_draft_model(DrafterConfig(dtype="float32", speculative_config=spec))
    config = json.loads((tmp_path / "config.json").read_text())
    for value, is_good in ((258, True), (259, False), ("x", False), (True, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"pard_token": value}))
        if is_good:
            assert read_mask_token_id(tmp_path, 259) == value
            continue
        with pytest.raises(InvalidArgumentError, match=r"has pard_token .*, but the vocabulary is 0 to 258"):
            read_mask_token_id(tmp_path, 259)
    (tmp_path / "config.json").write_text(json.dumps(config | {"pard_token": 258}))
    method = load_draft_model(DrafterConfig(dtype="float32", kv_cache_memory=1 << 20, speculative_config=spec))
    method.open(0, open_request([5, 6, 7]))
    assert len(method.propose([Ask(0, 4)])[0].token_ids) == 4
    assert method.counts.num_eager_passes == 1
