"""EAGLE-3 in 8 bits, all drafts of a call in compiled code: what the float32 reference drafts, but for rounding, and the same in any company."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_svc.draft_head import DraftHead
from drafter_svc.load_head import head_drafter
from drafter_svc.method import Ask, Drafts
from drafter_svc.tiled_head import TiledHeadForward
from specwire.engine.heads.load import load_head
from specwire.engine.heads.vocabulary import FREQUENT_IDS
from specwire.engine.kernels.packed_linear import DigitLinear
from specwire.errors import InvalidArgumentError
from specwire.messages import RowStatus
from tests.heads.checkpoints import VOCAB, Checkpoint
from tests.heads.drafting import Bench, GivenFeatures
from tests.heads.reference import Noise, Reference
from tests.heads.target import Target
from tests.heads.test_drafts import GREEDY, SAMPLED, text

pytestmark = pytest.mark.skipif(not DigitLinear.is_fast(), reason="this CPU has no tiled passes")
NAMES = ["eagle3_speculators", "eagle3_plain", "eagle3_two_layers", "eagle3_norm_before_fc"]


def tiled_bench(target: Target, checkpoint: Checkpoint, *, num_blocks: int = 200) -> Bench:
    loaded, features = load_head(checkpoint.folder, "eagle3", target=target.folder), GivenFeatures()
    assert loaded.is_tiled
    method = head_drafter(loaded, features, num_blocks=num_blocks, max_num_drafts=4, max_num_seqs=32)
    assert isinstance(method._forward, TiledHeadForward)
    return Bench(loaded, Reference(checkpoint, target.tensors), target, checkpoint, features, method)


def propose(method: DraftHead, asks: list[Ask]) -> list[Drafts]:
    answers = method.propose(asks)
    assert [answer.status for answer in answers] == [RowStatus.OK] * len(asks)
    method.check_integrity()
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_reference_s_but_for_rounding(name: str, target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    bench = tiled_bench(target, checkpoints[name])
    num_same = num_drafts = 0
    for seq_id in range(10):
        bench.begin(seq_id, text(seq_id), 20 + 3 * seq_id, SAMPLED if seq_id % 2 else GREEDY)
    bench.catch_up(24)
    for _ in range(3):
        for seq_id, drafts in enumerate(propose(bench.method, [Ask(seq_id, 4) for seq_id in range(10)])):
            known, request = bench.num_known[seq_id], bench.requests[seq_id]
            noise = Noise(request.sampling.temperature or 0.0, request.noise_key, request.choice)
            expected, scores = bench.reference.drafts(bench.texts[seq_id][:known], bench.features.rows[seq_id][: known - 1], 4, noise)
            for own, other, score, its in zip(drafts.token_ids, expected, drafts.scores, scores, strict=True):
                num_drafts += 1
                if own != other:
                    break  # from here on the two are fed different tokens
                num_same += 1
                assert score == pytest.approx(its, rel=0.15, abs=0.01)
            bench.commit(seq_id, 1 + seq_id % 4)
    assert num_same >= 0.9 * num_drafts > 60, f"{num_same} of {num_drafts}"


@pytest.mark.parametrize("name", ["eagle3_speculators", "eagle3_two_layers"])
def test_drafts_do_not_depend_on_company_chunks_or_threads(name: str, target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    """Bit for bit."""
    alone, together = tiled_bench(target, checkpoints[name]), tiled_bench(target, checkpoints[name])
    sizes = [2, 17, 18, 33, 60, 61, 100]
    for bench in (alone, together):
        for seq_id, num_tokens in enumerate(sizes):
            bench.begin(seq_id, text(seq_id), num_tokens, SAMPLED if seq_id % 2 else GREEDY)
    alone.catch_up(200)
    torch.set_num_threads(3)
    together.catch_up(7)
    for counts in ([4, 1, 3, 2, 4, 4, 1], [2, 4, 4, 4, 4, 1, 3]):
        asks = [Ask(seq_id, count) for seq_id, count in enumerate(counts)]
        apart = [propose(alone.method, [ask])[0] for ask in asks]
        assert propose(together.method, asks) == apart
        assert [len(drafts.token_ids) for drafts in apart] == counts
        for bench in (alone, together):
            for seq_id in range(len(sizes)):
                bench.commit(seq_id, 1 + seq_id % 5)


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_features_that_are_no_numbers_harm_no_other_sequence(value: float, target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    bench, clean = (tiled_bench(target, checkpoints["eagle3_speculators"], num_blocks=12) for _ in range(2))
    for one in (bench, clean):
        for seq_id, num_tokens in enumerate([20, 20, 40]):
            one.begin(seq_id, text(seq_id), num_tokens, SAMPLED if seq_id == 1 else GREEDY)
    bench.features.rows[0][7:] = value
    for one in (bench, clean):
        one.catch_up(24)
    for _ in range(2):
        answers, expected = (propose(one.method, [Ask(seq_id, 4) for seq_id in range(3)]) for one in (bench, clean))
        assert answers[1:] == expected[1:]
        assert len(answers[0].token_ids) == 4
        assert all(0 <= token_id < VOCAB for token_id in answers[0].token_ids)
        for one in (bench, clean):
            for seq_id in range(3):
                one.commit(seq_id, 3)


def test_only_frequent_ids_are_drafted_where_the_folder_names_some(target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    folder, ids = tmp_path / "head", np.arange(5, VOCAB, 3, dtype=np.int32)
    shutil.copytree(checkpoints["eagle3_two_layers"].folder, folder)
    np.save(folder / FREQUENT_IDS, ids)
    loaded, exact = load_head(folder, "eagle3", target=target.folder), load_head(folder, "eagle3", target=target.folder, dtype="float32")
    assert exact.head.vocabulary.num_drafted == VOCAB, "who asks for numbers gets the whole head"
    narrowed = loaded.head.vocabulary.target_ids
    assert narrowed is not None
    assert narrowed.tolist() == ids.tolist()
    bench = tiled_bench(target, dataclasses.replace(checkpoints["eagle3_two_layers"], folder=folder))
    drafted = set[int]()
    for seq_id in range(6):
        bench.begin(seq_id, text(seq_id), 15, SAMPLED if seq_id % 2 else GREEDY)
        drafted |= set(propose(bench.method, [Ask(seq_id, 4)])[0].token_ids)
    assert len(drafted) > 5
    assert drafted <= set(ids.tolist())


@pytest.mark.parametrize("ids", [np.array([1.0]), np.array([4, 4], np.int32), np.array([VOCAB], np.int32), np.zeros((1, 1), np.int32)])
def test_frequent_ids_that_are_none_are_refused(ids: np.ndarray, target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(checkpoints["eagle3_two_layers"].folder, folder)
    np.save(folder / FREQUENT_IDS, ids)
    with pytest.raises(InvalidArgumentError, match=f"must hold different int32 ids of 0 to {VOCAB - 1}"):
        load_head(folder, "eagle3", target=target.folder)
