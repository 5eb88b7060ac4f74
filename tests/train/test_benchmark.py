"""Counting what heads are worth, and the script that trains and compares them, on a tiny target."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import train_heads
from benchmarks.gpu.bench_answers import Answers, category
from benchmarks.gpu.bench_heads import Drafts, accepted_drafts, describe, describe_folder, lookup_drafts, row_offsets, suffix_steps, tokens_per_step
from specwire.bench.workload import PromptLine


@pytest.fixture
def answers() -> Answers:
    """Two prompts, each at the three temperatures; answers of ten tokens that repeat with a period of four."""
    texts = [np.array([1, 2, *([7, 8, 9, 10 + row % 2] * 3)[:10]], dtype=np.int32) for row in range(6)]
    return Answers(
        tokens=np.concatenate(texts),
        starts=np.arange(7, dtype=np.int64) * 12,
        prompt_lens=np.full(6, 2, dtype=np.int64),
        temperatures=np.tile(np.array([0.0, 0.7, 1.0], dtype=np.float32), 2),
        keys=np.arange(6, dtype=np.int64),
        categories=np.array(["qa"] * 3 + ["rag"] * 3),
        loops=np.array([True] * 3 + [False] * 3),
    )


def perfect(answers: Answers, num_drafts: int, score: float) -> Drafts:
    """What follows, and beyond the end a token that never does."""
    rows = []
    for row in range(6):
        text = answers.tokens[12 * row : 12 * (row + 1)].tolist() + [99] * num_drafts
        rows += [text[place + 1 : place + 1 + num_drafts] for place in range(2, 11)]
    return Drafts(np.array(rows, dtype=np.int32), np.full((len(rows), num_drafts), score, dtype=np.float32))


def test_drafts_that_are_always_right_take_whole_steps(answers: Answers) -> None:
    assert row_offsets(answers).tolist() == [0, 9, 18, 27, 36, 45, 54]
    drafts = perfect(answers, 2, 0.9)
    assert accepted_drafts(answers, drafts.tokens)[:9].tolist() == [2] * 7 + [2, 1]
    figures = describe(answers, drafts, (1, 2))
    assert figures["k2"]["t0"]["all"] == 3.0
    assert figures["k1"]["t0.7"]["by_category"] == {"qa": 1.8, "rag": 1.8}  # nine tokens in five steps
    assert figures["k2"]["t1"]["calibration_error"] == pytest.approx(0.1, abs=1e-4)
    assert figures["k2"]["t1"]["first_drafts_accepted"] == [1.0, 1.0]
    wrong = Drafts(np.full_like(drafts.tokens, 99), drafts.scores)
    assert describe(answers, wrong, (2,))["k2"]["t0"] == figures["k1"]["t0"] | {
        "all": 1.0, "without_loops": 1.0, "by_category": {"qa": 1.0, "rag": 1.0}, "first_drafts_accepted": [0.0, 0.0],
        "calibration_error": 0.9, "area_under_curve": None,
    }  # fmt: skip


def test_of_head_and_lookup_the_surer_one_is_taken(answers: Answers) -> None:
    wrong = Drafts(np.full((54, 2), 99, dtype=np.int32), np.full((54, 2), 0.5, dtype=np.float32))
    for score, expected in ((0.4, 1.0), (0.6, 3.0)):
        assert describe(answers, wrong, (2,), perfect(answers, 2, score))["k2"]["t0"]["all"] == expected


def test_lookups_find_what_repeats(answers: Answers) -> None:
    drafts = lookup_drafts(answers, 2, 3)
    first = drafts.tokens[:9]
    assert (first[:4] == -1).all(), "nothing has repeated yet"
    assert first[5, :3].tolist() == [9, 10, 7]  # behind 7 8, of the first round
    assert (drafts.scores[5] > 0.5).all()
    steps = suffix_steps(answers, 5)
    assert (steps < 9).all()
    assert tokens_per_step(answers, steps)["t0"]["without_loops"] >= 1.5


def test_categories_are_those_of_the_tables() -> None:
    names = [("specbench/1", "writing"), ("specbench/2", "coding"), ("HumanEval/0", "coding"), ("x", "rag")]
    assert [category(PromptLine(name, "", kind, 1.0)) for name, kind in names] == ["mt_bench", "mt_bench", "coding", "rag"]


def test_heads_are_trained_counted_and_packed(tmp_path: Path) -> None:
    def run(seconds: float) -> int:
        folders = [part for name in ("work", "results", "pack") for part in (f"--{name}", str(tmp_path / name))]
        return train_heads.main(["--device", "cpu", "--tiny", *folders, "--seconds", str(seconds), "--recipes", "eagle3", "dspark", "eagle3-kl"])

    assert run(0.1) == 3, "nothing fits"
    assert run(10_000) == 0
    results = tmp_path / "results"
    heads = json.loads((results / "heads.json").read_text())
    assert heads.keys() == {"eagle3", "dspark", "eagle3-kl", "ngram", "ngram-2-4", "ngram-3-4", "suffix"} | {
        f"{name}+lookup" for name in ("eagle3", "dspark", "eagle3-kl")
    }
    assert heads["eagle3"]["k5"]["t0.7"]["all"] >= 1
    again = describe_folder(results / "bench")
    assert {name: again[name] for name in heads} == heads
    before = (results / "eagle3" / "head" / "model.safetensors").stat().st_mtime_ns
    assert run(10_000) == 0
    assert (results / "eagle3" / "head" / "model.safetensors").stat().st_mtime_ns == before, "a second call finds all done"
    [part] = (tmp_path / "pack").iterdir()
    with tarfile.open(part) as archive:
        names = archive.getnames()
    assert {f"results/{name}/head/README.md" for name in ("eagle3", "dspark", "eagle3-kl")} <= set(names)
    weights = [f"results/{name}/head/model.safetensors" for name in ("dspark", "eagle3", "eagle3-kl")]
    assert [name for name in names if name.endswith(".safetensors")] == weights, "those that are served come first"
    assert {"results/bench/answers.npz", "work/answers/part-00000.npz"} <= set(names)


def test_answers_of_an_earlier_call_are_taken_on_any_device(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text(json.dumps({"rows_per_part": 2048}))
    assert train_heads._rows_per_part(tmp_path, "cpu") == 2048
    assert train_heads._rows_per_part(tmp_path / "none", "cpu") == 32
