"""A head with fewer ids drafts the best of those that it kept."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from specwire.engine.heads.load import load_head
from specwire.engine.heads.vocabulary import FREQUENT_IDS
from specwire.errors import FailedPreconditionError, InvalidArgumentError
from specwire.train.batches import BatchSource
from specwire.train.narrow import count_ids, main, narrow, note_frequent_ids
from specwire.train.target import Target
from tests.train.conftest import small
from tests.train.test_export import served_drafts, train_and_export


@pytest.fixture
def head(target: Target, source: BatchSource, tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    train_and_export(small("eagle3", num_steps=1), target, source, folder)
    return folder


@pytest.fixture
def answers(target: Target, tmp_path: Path) -> Path:
    """Where ids are the more frequent the higher they are, in two parts."""
    folder, size = tmp_path / "answers", target.config.vocab_size
    folder.mkdir()
    tokens = np.repeat(np.arange(size), np.arange(size) % 7 + np.arange(size) // 7)
    for number, part in enumerate(np.array_split(tokens, 2)):
        np.savez(folder / f"part-{number:05d}.npz", tokens=part, lengths=np.array([len(part)]))
    return folder


def test_the_most_frequent_ids_are_kept_and_the_best_of_them_drafted(
    head: Path, answers: Path, target: Target, source: BatchSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, num_ids, output = target.config.vocab_size, 32, tmp_path / "narrow"
    monkeypatch.setattr(sys, "argv", ["narrow", str(head), str(output), "--answers", str(answers), "--ids", str(num_ids)])
    main()
    counts = count_ids(answers, size)
    assert counts.tolist() == [index % 7 + index // 7 for index in range(size)]
    loaded = {folder: load_head(folder, "eagle3", target=target.folder, dtype="float32").head.vocabulary for folder in (head, output)}
    kept = loaded[output].target_ids
    assert kept is not None
    assert len(kept) == num_ids
    assert counts[kept.numpy()].min() >= np.sort(counts)[-num_ids]
    hidden = torch.randn(3, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded[output].head(hidden), loaded[head].head(hidden)[:, kept])
    batch, recipe = source.batch(np.arange(2)), small("eagle3")
    drafted = [token for row in range(2) for token in served_drafts(output, recipe, target, batch, row, int(batch.prompt_lens[row]))[0]]
    assert set(drafted) <= set(kept.tolist())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (head, output))
    assert after == before | {"draft_vocab_size": num_ids}


def test_ids_are_noted_in_the_head_s_folder_for_cpus(head: Path, answers: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in head.iterdir()}
    monkeypatch.setattr(sys, "argv", ["narrow", str(head), "--answers", str(answers), "--ids", "32"])
    main()
    ids, counts = np.load(head / FREQUENT_IDS), count_ids(answers, target.config.vocab_size)
    assert len(set(ids.tolist())) == 32
    assert counts[ids].min() >= np.sort(counts)[-32]
    assert {path.name: path.read_bytes() for path in head.iterdir() if path.name != FREQUENT_IDS} == before
    with pytest.raises(InvalidArgumentError, match="--ids is 0"):
        note_frequent_ids(head, counts, 0)


@pytest.mark.parametrize("num_ids", [0, 10**6])
def test_a_number_of_ids_that_leaves_none_out_is_refused(head: Path, answers: Path, target: Target, tmp_path: Path, num_ids: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--ids is {num_ids}, but must be 1 to"):
        narrow(head, tmp_path / "narrow", count_ids(answers, target.config.vocab_size), num_ids)
    assert not (tmp_path / "narrow").exists()


def test_what_cannot_be_narrowed_is_refused(head: Path, answers: Path, target: Target, tmp_path: Path) -> None:
    counts = count_ids(answers, target.config.vocab_size)
    with pytest.raises(InvalidArgumentError, match="the head itself"):
        narrow(head, head, counts, 32)
    narrow(head, tmp_path / "narrow", counts, 32)
    with pytest.raises(FailedPreconditionError, match="has d2t of its own"):
        narrow(tmp_path / "narrow", tmp_path / "again", counts, 16)
    with pytest.raises(FailedPreconditionError, match="no part"):
        count_ids(head, 10)
    with pytest.raises(FailedPreconditionError, match="name answers of this target"):
        count_ids(answers, 10)
