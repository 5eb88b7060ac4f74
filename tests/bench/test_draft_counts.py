"""What benchmarks of drafts make of counts."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.concurrency import compare, main, methods_with, moments
from benchmarks.cpu import Decoded
from benchmarks.gpu.bench_answers import Answers
from benchmarks.lists_cpu import choose, tokens_a_step
from benchmarks.sharpness import describe, gain, sampled
from specwire.bench.workload import PromptLine
from specwire.messages import SpecStats
from tests.heads.checkpoints import WRITERS


def stats(accepted: list[int], k: int = 3) -> SpecStats:
    """Of drafts of which so many tokens each were accepted."""
    return SpecStats(num_drafts=len(accepted), accepted_per_position=tuple(sum(count > position for count in accepted) for position in range(k)))


def test_mean_and_error_are_those_of_the_single_drafts() -> None:
    accepted = [0, 3, 1, 1, 2, 0, 3, 3]
    mean, error = moments(stats(accepted))
    assert mean == pytest.approx(np.mean(accepted))
    assert error == pytest.approx(np.std(accepted) / len(accepted) ** 0.5)
    assert moments(SpecStats()) == (0.0, 0.0)


def test_a_difference_is_judged_by_its_error() -> None:
    few, many = [0, 1, 2, 3] * 20, [0, 1, 2, 3] * 2000
    shifted = [1, 1, 2, 3] * 2000
    assert compare(stats(many), stats(many))["standard_errors_apart"] == 0
    assert compare(stats(few), stats(shifted))["is_within_two"]
    found = compare(stats(many), stats(shifted))
    assert not found["is_within_two"]
    assert found["has_enough_drafts"]
    assert not compare(stats(few), stats(many))["has_enough_drafts"]


@pytest.mark.parametrize(("name", "method"), [("eagle3_speculators", "eagle3"), ("dspark_native", "dspark")])
def test_drafters_are_those_of_the_heads_method(name: str, method: str, tmp_path: Path) -> None:
    methods = methods_with(str(WRITERS[name](tmp_path / name).folder))
    assert methods[method] == (method,)
    assert methods[f"ngram+{method}"] == ("ngram", method)
    assert set(methods) == {method, f"ngram+{method}", "suffix", "ngram", "draft_model"}


def test_a_drafter_that_the_head_is_not_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = WRITERS["dspark_native"](tmp_path / "head").folder
    monkeypatch.setattr("sys.argv", ["concurrency", "--prompts", "none", "--methods", "ngram", "eagle3", "--head", str(folder)])
    with pytest.raises(SystemExit):
        main()
    assert f"--methods are ngram eagle3, but {folder} has none for eagle3; take some of dspark" in " ".join(capsys.readouterr().err.split())


def test_prompts_are_spread_over_their_categories() -> None:
    lines = [PromptLine(f"{kind}/{number}", "text", kind, 1.0) for kind, count in (("qa", 5), ("rag", 1), ("json", 3)) for number in range(count)]
    assert [line.name for line in choose(lines, 6)] == ["qa/0", "rag/0", "json/0", "qa/1", "json/1", "qa/2"]


def test_the_first_token_of_an_answer_is_not_drafted() -> None:
    decoded = [Decoded([1] * 9, 8, 1.0, num_steps=3), Decoded([1] * 5, 4, 1.0, num_steps=5)]
    assert tokens_a_step(decoded) == (8 + 4) / (2 + 4)


def test_sharpness_is_judged_by_sampled_answers() -> None:
    text = np.arange(30, dtype=np.int32)
    answers = Answers(
        tokens=text, starts=np.array([0, 10, 20, 30]), prompt_lens=np.array([3, 3, 3]), temperatures=np.array([0, 0.7, 1.0], dtype=np.float32),
        keys=np.array([1, 2, 3]), categories=np.array(["a", "b", "c"]), loops=np.zeros(3, dtype=bool),
    )  # fmt: skip
    found = sampled(answers)
    assert found.tokens.tolist() == list(range(10, 30))
    assert (found.starts.tolist(), found.keys.tolist()) == ([0, 10, 20], [2, 3])
    # Six tokens behind the first one of each; of the first answer, all drafts fail, of the second one, one is right everywhere.
    plain, better = np.zeros(12, dtype=np.int64), np.repeat([0, 1], 6)
    rows = [{"factor": factor} | describe(found, accepted, plain) for factor, accepted in ((1.0, plain), (1.2, better))]
    assert [row["t1"]["tokens_a_step"] for row in rows] == [1.0, 2.0]
    assert rows[1]["t0.7"]["more_than_plain"] == 0
    assert rows[1]["t1"]["more_than_plain"] == 1
    assert gain(rows, 1.2) == 0.5
