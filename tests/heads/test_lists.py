"""Heads beside a look-up: after steps that the head was not asked in, its drafts are the reference's."""

import pytest

from drafter_svc.method import Ask
from drafter_svc.model_and_lookups import ModelAndLookups
from drafter_svc.ngram import Ngram
from specwire.messages import RowStatus
from tests.heads.checkpoints import Checkpoint
from tests.heads.drafting import make_bench
from tests.heads.reference import Noise
from tests.heads.target import Target

PHRASE = [31, 7, 90, 14, 55]
TEXT = [PHRASE[i % 5] for i in range(120)] + [(17 * i * i + 5) % 250 for i in range(60)]
"""What a look-up knows by heart, then what it can't know."""


@pytest.mark.parametrize("name", ["eagle3_speculators", "dspark_native", "mtp_mimo"])
def test_drafts_behind_steps_without_the_head_are_the_references(target: Target, checkpoints: dict[str, Checkpoint], name: str) -> None:
    bench = make_bench(target, checkpoints[name])
    head, ngram = bench.method, Ngram(2, 4, max_num_drafts=4)
    method = ModelAndLookups([ngram], head, ["ngram", name])
    bench.method = method  # type: ignore[assignment]
    for seq_id in range(4):
        bench.begin(seq_id, TEXT[seq_id:], 20)
    method.catch_up(512)
    num_from_head = 0
    while (known := bench.num_known[0]) < 160:
        asks = [Ask(seq_id, 4) for seq_id in range(4)] if known % 9 else []  # at times a step is without drafts
        for ask, drafts in zip(asks, method.propose(asks), strict=True):
            text, request = bench.texts[ask.seq_id], bench.requests[ask.seq_id]
            assert drafts.status in (RowStatus.OK, RowStatus.CATCHING_UP)
            looked_up = ngram.propose([ask])[0].token_ids
            if drafts.token_ids and drafts.token_ids != looked_up:
                known = bench.num_known[ask.seq_id]
                expected, _ = bench.reference.drafts(text[:known], bench.features.rows[ask.seq_id][: known - 1], 4, Noise(0.0, request.noise_key))
                assert drafts.token_ids == expected, f"sequence {ask.seq_id} at {known} tokens"
                num_from_head += known > 120
        for seq_id in range(4):
            bench.commit(seq_id, 2)
        method.catch_up(64)
        head.check_integrity()
    assert method.counts.num_spared_rows > 60
    assert num_from_head > 20
    assert (method.features, method.num_free_blocks) == (bench.features, head.num_free_blocks)
    for seq_id in range(4):
        method.close(seq_id)
    assert head.num_free_blocks == head.description.num_blocks
