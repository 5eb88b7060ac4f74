"""benchmarks.advise: the advised K beside all others."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import advise, advise_workloads
from specwire.bench.workload import read_prompt_file
from tests.bench.conftest import K, Served

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"


def test_the_advised_k_is_that_of_a_lanes_batch() -> None:
    advice = {"tokens_per_step_by_k": [1.0, 1.5, 1.8], "num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 64, 0]]}
    rates = {4: [[10.0, 12.0, 11.0], [20.0], [19.0]], 8: [[30.0], [20.0], [10.0]]}
    few, many = advise.compare(advice, rates, num_lanes=2)
    assert (few["advised_k"], few["best_k"], few["of_best"], few["of_none"]) == (2, 1, 19 / 20, pytest.approx(19 / 11))
    assert (many["advised_k"], many["best_k"], many["of_best"]) == (0, 0, 1.0)


def test_a_sweep(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens cost nothing and drafts are right, so that the largest K is the best."""
    served.verifier.script.delay_s = 0.003
    served.drafter.script.acceptance = 1.0
    advice = {"tokens_per_step_by_k": [1.0, 2.0, 3.0, 4.0], "num_speculative_tokens_per_batch_size": [[1, 64, K]], "headline": "all"}
    (tmp_path / "advice.json").write_text(json.dumps(advice))
    arguments = ["--address", served.address, "--prompts", PROMPTS, "--advice", tmp_path / "advice.json", "--results", tmp_path]
    arguments += ["--concurrency", 2, "--output-len", 24, "--min-requests", 2, "--waves", 1, "--repeats", 1]
    monkeypatch.setattr(sys, "argv", ["advise", *map(str, arguments)])
    advise.main()
    report = json.loads((tmp_path / "advise.json").read_text())
    [row] = report["sizes"]
    assert (row["concurrency"], row["best_k"], row["advised_k"], row["of_best"]) == (2, K, K, 1.0)
    assert len(row["tokens_per_s_by_k"]) == K + 1
    assert row["of_none"] > 1.5
    assert "holds: at worst 1.000" in capsys.readouterr().out


def test_three_workloads(tmp_path: Path) -> None:
    """As many prompts of each, spread over their categories; long ones are left out, and summaries are asked to copy."""
    names = {"writing": 30, "roleplay": 30, "humanities": 30, "stem": 30, "summarization": 3000, "coding": 30, "qa": 30}
    lines = [
        {"id": f"{name}/{n}", "category": name, "turns": ["Summarize: " + "x" * (size if n % 3 == 0 else 40)]}
        for name, size in names.items()
        for n in range(9)
    ]
    chosen = advise_workloads.workloads(lines, 8)
    assert {name: len(each) for name, each in chosen.items()} == {"chat": 8, "summaries": 6, "code": 8}
    assert {line["category"] for line in chosen["chat"]} == {"writing", "roleplay", "humanities", "stem"}
    assert all(
        line["turns"][0].startswith("Copy the most important sentences") and "Summarize" not in line["turns"][0] for line in chosen["summaries"]
    )
    assert [line["category"] == "coding" for line in advise_workloads.mixed(chosen)] == [False, False, True] * 6
    advise_workloads.write_prompts(chosen, tmp_path)
    assert [len(read_prompt_file(tmp_path / f"{name}.jsonl")) for name in chosen] == [8, 6, 8]
