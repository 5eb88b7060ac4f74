"""`specwire sweep`: on a running coordinator, on a stack of its own with a tiny model, and what is made of its figures."""

import argparse
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from benchmarks import sweep_cpu
from specwire.bench.metrics import measure
from specwire.bench.record import RequestRecord
from specwire.bench.runner import LoadRun
from specwire.bench.sweep.picture import draw
from specwire.bench.sweep.policies import ADAPTIVE, DYNAMIC, NONE, Policy, best_schedule, speculation_of
from specwire.bench.sweep.report import median_cells, print_sweep
from specwire.bench.sweep.run import Cell, SweepResult
from specwire.cli import app
from specwire.policy.schedule import dense_schedule
from specwire.speculative_config import SpeculativeConfig
from tests.bench.conftest import K, Served
from tests.engine.tiny_models import save_tiny_model


def run_sweep(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def cell(policy: str, concurrency: int, tokens_per_s: float, repeat: int = 0) -> Cell:
    """Of one request that took a second."""
    record = RequestRecord(0, 4, 0.0, 0.0, 1.0, [0.5, 1.0], [1, int(tokens_per_s) - 1], "length")
    return Cell(policy, concurrency, repeat, measure(LoadRun([record], 0.0, 1.0), (50,)), 0)


def test_a_running_coordinator(served: Served, tmp_path: Path) -> None:
    output = tmp_path / "out"
    load = ("--address", served.address, "--concurrency", "1,4", "--fixed", f"1,{K}", "--input-len", 8, "--output-len", 24, "--prompts-per-user", 2)
    result = run_sweep(*load, "--output", output)
    assert result.exit_code == 0, result.stderr
    report = json.loads((output / "sweep.json").read_text())
    rows = {(row["policy"], row["concurrency"]): row for row in report["rows"]}
    assert list(rows) == [(policy, size) for policy in ("none", "fixed-1", f"fixed-{K}") for size in (1, 4)]
    for (policy, size), row in rows.items():
        assert (row["completed"], row["total_output_tokens"], row["num_different"]) == (2 * size, 2 * size * 24, 0)
        assert row["max_concurrent_requests"] <= size
        assert row["user_tokens_per_s"] == pytest.approx(1000 / row["median_tpot_ms"])
        assert (row["spec_decode_num_drafts"] > 0) is (policy != "none")
        assert sum(rate > 0 for rate in row["spec_decode_per_position_acceptance_rates"]) <= (1 if policy == "fixed-1" else K)
        assert row["total_cached_tokens"] == 0  # though the same prompts came before
    assert (output / "sweep.png").stat().st_size > 10_000
    assert "fixed-3" in result.stdout
    assert "0 of 8" in result.stdout

    refused = run_sweep("--address", served.address, "--policies", "adaptive", "--output", output)
    assert (refused.exit_code, "--policies has adaptive, but the running coordinator chooses fixed-3 itself" in refused.stderr) == (1, True)
    refused = run_sweep("--address", served.address, "--fixed", K + 1, "--output", output)
    assert (refused.exit_code, f"--fixed has {K + 1}" in refused.stderr) == (1, True)


@pytest.mark.timeout(180)
def test_an_own_stack(tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifier and drafter start once; each policy gets a coordinator that has it. All answers are the same."""
    monkeypatch.setattr("tempfile.tempdir", str(socket_dir))
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    speculation = json.dumps({"num_speculative_tokens": 3, "prompt_lookup_min": 1})
    stack = ("--model", tmp_path / "tiny", "--dtype", "float32", "--num-threads", 1, "--kv-cache-memory", 8_000_000)
    load = ("--concurrency", "2", "--input-len", 16, "--output-len", 32, "--prompts-per-user", 2, "--ignore-eos")
    result = run_sweep(*stack, *load, "--speculative-config", speculation, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    report = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [row["policy"] for row in report["rows"]] == ["none", "fixed-3", "dynamic", "adaptive"]
    assert [row["num_different"] for row in report["rows"]] == [0] * 4
    assert [row["total_output_tokens"] for row in report["rows"]] == [4 * 32] * 4
    plain, fixed, dynamic, _ = report["rows"]
    assert (plain["spec_decode_num_drafts"], plain["spec_decode_num_steps"]) == (0, 4 * 32)
    assert fixed["spec_decode_draft_tokens"] > 0
    [[start, end, k]] = report["schedule"]
    assert (start, end > 1000) == (1, True)
    assert (dynamic["spec_decode_num_drafts"] > 0) is (k > 0)
    assert k == (3 if fixed["output_throughput"] > plain["output_throughput"] else 0)
    assert not list(socket_dir.iterdir())


def test_what_a_policy_means() -> None:
    config = SpeculativeConfig(num_speculative_tokens=5, num_speculative_tokens_per_batch_size=((1, 8, 2),), enable_adaptive_verification=True)
    assert speculation_of(NONE, config, None).method is None
    fixed = speculation_of(Policy.fixed(4), config, None)
    assert dense_schedule(fixed.num_speculative_tokens_per_batch_size, 5, 100) == [0] + [4] * 100
    assert fixed.enable_adaptive_verification is False
    dynamic = speculation_of(DYNAMIC, config, ((1, 4, 3), (5, 9, 0)))
    assert dense_schedule(dynamic.num_speculative_tokens_per_batch_size, 5, 10) == [0, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0]
    adaptive = speculation_of(ADAPTIVE, config, None)
    assert (adaptive.enable_adaptive_verification, adaptive.num_speculative_tokens_per_batch_size) == (True, None)


def test_the_best_of_what_was_measured() -> None:
    rates = {1: {0: 10.0, 2: 15.0, 5: 20.0}, 4: {0: 30.0, 2: 45.0, 5: 41.0}, 16: {0: 90.0, 2: 95.0, 5: 80.0}, 64: {0: 300.0, 2: 250.0, 5: 200.0}}
    assert best_schedule(rates, 1) == ((1, 2, 5), (3, 32, 2), (33, 1 << 20, 0))
    assert best_schedule(rates, 4) == ((1, 2, 5), (3, 8, 2), (9, 1 << 20, 0))
    assert best_schedule({8: {0: 1.0}}, 1) == ((1, 1 << 20, 0),)


def test_medians_and_the_table() -> None:
    cells = [cell("none", 4, 100, 0), cell("none", 4, 300, 1), cell("none", 4, 200, 2), cell("fixed-2", 4, 300), cell("none", 1, 50)]
    chosen = median_cells(cells)
    assert [(each.policy, each.concurrency, each.metrics.output_throughput) for each in chosen] == [
        ("none", 1, 50.0), ("none", 4, 200.0), ("fixed-2", 4, 300.0)
    ]  # fmt: skip
    console = Console(width=160, file=io.StringIO())
    print_sweep(console, SweepResult("model", cells, ((1, 8, 2),)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "schedule of dynamic: [[1, 8, 2]]" in text
    assert [line.split()[:5] for line in text.splitlines() if "fixed-2" in line] == [["4", "fixed-2", "300.0", "598.0", "1.50"]]


def test_a_picture_of_one_point(tmp_path: Path) -> None:
    draw(tmp_path / "x.png", [cell("none", 4, 100), cell("adaptive", 4, 150)], "model")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency is '1,x'"),
        (["--concurrency", "0"], "--concurrency has 0"),
        (["--policies", "best"], "--policies has 'best'"),
        (["--fixed", "0"], "--fixed has 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--address", "unix:x", "--model", "y"], "--model is of an own stack"),
        (["--address", "unix:x", "--set", "verifier.max_num_seqs=1"], "--set is of an own stack"),
        (["--model", "./nothing"], "the model ./nothing does not exist"),
        (["--prompts", "none.jsonl"], "the prompt file none.jsonl can't be read"),
    ],
)
def test_wrong_arguments(arguments: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_sweep(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "sweep").exists()


def test_the_benchmark_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command is one that there is, with prompts of all kinds, and its files land where they are told to."""
    lines = [{"category": name, "id": name, "turns": ["Summarize: it"]} for name in ("writing", "summarization", "coding")]
    prompts = tmp_path / "prompts.jsonl.gz"
    prompts.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    asked: dict[str, Any] = {}

    def run(command: list[str], *, cwd: Path, **_: Any) -> Any:
        asked["prompts"] = [json.loads(line)["id"] for line in (cwd / "mixed.jsonl").read_text().splitlines()]
        asked["refusal"] = CliRunner().invoke(app, [*command[3:], "--concurrency", "0"])  # everything before it is understood
        for name in ("sweep.json", "sweep.png"):
            (cwd / name).write_text(name)
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(sweep_cpu.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["sweep_cpu", str(prompts), "--number", "1", "--results", str(tmp_path), "--images", str(tmp_path / "images")])
    sweep_cpu.main()
    assert asked["prompts"] == ["writing", "summarization", "coding"]
    assert "--concurrency" in asked["refusal"].stderr
    assert asked["refusal"].exit_code == 2
    assert ((tmp_path / "sweep_cpu.json").read_text(), (tmp_path / "images" / "sweep-cpu.png").read_text()) == ("sweep.json", "sweep.png")
