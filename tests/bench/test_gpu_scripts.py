"""The GPU benchmarks on tiny models: the same code from the command line to the file of results, on any machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import draft, engine, invariance, pareto, services, startup, variants

TINY = ("--device", "cpu", "--tiny", "--commit", "test")


def results(folder: Path, name: str) -> dict[str, Any]:
    """A slice's file, which must be complete and name no folder of this machine."""
    text = (folder / f"{name}.json").read_text()
    assert str(folder) not in text
    found = json.loads(text)
    assert found["is_complete"]
    assert found["rows"]
    assert found["command"].startswith(f"python -m benchmarks.gpu.{name.partition('-')[0]} --device cpu --tiny --commit test --out {folder.name}")
    return found


def test_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--out", str(tmp_path), "--only", "smollm-unix", "--concurrency", "2"]
    services.main(arguments)
    found = results(tmp_path, "services-smollm-unix")
    [row] = found["rows"]
    assert row["num_steps"] == 12  # all steps of the traced request but the one of its first token
    assert min(row["engine_ms"], row["forward_ms"], row["stream_ms"], row["hop_ms"], row["period_ms"]) > 0
    assert row["propose_ms"] == 0

    capsys.readouterr()
    services.main(arguments)
    assert "--again measures it again" in capsys.readouterr().out
    assert results(tmp_path, "services-smollm-unix")["date"] == found["date"]


def test_draft(tmp_path: Path) -> None:
    draft.main([*TINY, "--out", str(tmp_path), "--only", "alone", "fixed", "--concurrency", "2"])
    [row] = results(tmp_path, "draft-alone")["rows"]
    assert 0 < row["launch_ms"] <= row["call_ms"]
    assert row["first_ms"] < row["call_ms"]
    found = results(tmp_path, "draft-fixed")
    assert set(found["draft_costs"]) == {"1 sequences", "2 sequences"}
    [row] = found["rows"]
    assert row["k"] == 5
    assert 1 < row["acceptance_length"] <= 6
    assert row["plain"]["acceptance_length"] == 1
    assert row["predicted_ms"] > 0


def test_pareto(tmp_path: Path) -> None:
    """The block drafter: every policy has its row, bars compare medians, and prompts come from the prefix cache."""
    pareto.main([*TINY, "--out", str(tmp_path), "--only", "block-mixed", "rollout", "--concurrency", "2", "--repeats", "2"])
    found = results(tmp_path, "pareto-block-mixed")
    rows = {(row["policy"], row["sigma"]): row for row in found["rows"]}
    names = ["none", *(f"K={k}" for k in pareto.FIXED), "dynamic", "adaptive"]
    assert rows.keys() == {*((name, 0.5) for name in names), ("adaptive", 0.0)}
    assert {row["cached_tokens"] for row in rows.values()} == {16}  # of 20: whole blocks
    assert rows["none", 0.5]["mean_k"] == 0
    assert rows["none", 0.5]["acceptance"] is None
    for k in pareto.FIXED:
        row = rows[f"K={k}", 0.5]
        assert row["mean_k"] == pytest.approx(k, rel=0.1)
        assert 0 < row["acceptance"] < 1
        assert row["tok_s"] == pytest.approx(2 * row["user_tok_s"])
    assert len(rows["adaptive", 0.5]["tok_s_of_repeats"]) == 2
    assert rows["adaptive", 0.5]["prediction_error"] > 0
    [beside, error] = found["bars"]
    assert beside["value"] == pytest.approx(rows["adaptive", 0.5]["tok_s"] / rows["none", 0.5]["tok_s"])
    assert error["value"] == rows["adaptive", 0.5]["prediction_error"]

    rollout = results(tmp_path, "pareto-rollout")
    seconds = {row["policy"]: row["seconds"] for row in rollout["rows"]}
    assert list(seconds) == names
    assert rollout["bars"][0]["value"] == pytest.approx(seconds["adaptive"] / seconds["none"])
    assert all(0 <= point["k"] <= 7 for row in rollout["rows"] for point in row.get("k_over_time", []))


def test_engine(tmp_path: Path) -> None:
    names = ["noise", "check-processed", "check-synthetic", "smollm", "prefill", "round"]
    engine.main([*TINY, "--out", str(tmp_path), "--only", *names, "--concurrency", "2"])
    for name in names:
        results(tmp_path, f"engine-{name}")
    assert sum(row.get("accepted", 0) for row in results(tmp_path, "engine-check-synthetic")["rows"]) > 0
    levels = {row["level"]: row for row in results(tmp_path, "engine-round")["rows"]}
    assert list(levels) == ["engine", "verifier", "worker"]
    for row in levels.values():
        assert 0 < row["pack_ms"] + row["replay_ms"] < row["total_ms"]
    assert 0 < levels["worker"]["forward_span_ms"] < levels["worker"]["total_ms"]


def test_variants(tmp_path: Path) -> None:
    mine = 'mine:{"starts_early": true, "products": []}'
    variants.main([*TINY, "--out", str(tmp_path), "--only", "check", "decode", "--variants", "no-early-start", mine, "--concurrency", "1"])
    assert [row["variant"] for row in results(tmp_path, "variants-decode")["rows"]] == ["base", "no-early-start", "mine", "base again"]
    assert {row["different"] for row in results(tmp_path, "variants-check")["rows"]} == {0}
    variants.main([*TINY, "--out", str(tmp_path), "--only", "draft", "--variants", "joined", "all"])
    rows = results(tmp_path, "variants-draft")["rows"]
    assert [row["variant"] for row in rows[:4]] == ["base", "joined", "all", "base again"]
    assert {row["equal_drafts"] for row in rows} == {1}
    with pytest.raises(SystemExit, match="products times kernels of a GPU"):
        variants.main([*TINY, "--out", str(tmp_path), "--only", "products"])
    with pytest.raises(SystemExit, match="of others give the options, as NAME:JSON"):
        variants.main([*TINY, "--out", str(tmp_path), "--variants", "cublas-rows"])
    with pytest.raises(SystemExit, match="but the backend takes"):
        variants.main([*TINY, "--out", str(tmp_path), "--variants", 'base:{"turbo": true}'])


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    startup.main([*TINY, "--out", str(tmp_path), "--only", "warm", "--concurrency", "1"])
    [row] = results(tmp_path, "startup-warm")["rows"]
    assert row["ready_s"] > 0
    assert any("ready: " in line for _, line in row["lines"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_invariance(tmp_path: Path) -> None:
    arguments = ["--prompts", "1", "--max-tokens", "24", "--configurations", "draft_model K=3", "head's drafter killed half-way"]
    invariance.main([*TINY, "--out", str(tmp_path), "--only", "drafters", "faults", *arguments])
    [row] = results(tmp_path, "invariance-drafters")["rows"]
    assert row["accepted_tokens"] > 0
    assert row["diverged"] == row["unexplained"] == 0
    [row] = results(tmp_path, "invariance-faults")["rows"]
    assert row["draft_tokens"] > 0
    assert row["drafter_losses"] == 1
    assert row["diverged"] == 0


def test_killing_runs_as_many_requests_as_fit_at_once() -> None:
    requests = [invariance.Case(str(prompt), name, [], params) for name, params in invariance.SAMPLINGS.items() for prompt in range(12)]
    chosen = invariance.third_of(requests)
    assert [(one.sampling, one.prompt) for one in chosen] == [(name, prompt) for name in invariance.SAMPLINGS for prompt in ("0", "3", "6", "9")]
    assert invariance.third_of(chosen) == chosen
