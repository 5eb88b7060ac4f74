"""`specwire advise` on scripted services, whose acceptance and speed are known."""

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks import advise_reports
from specwire.advise.measure import Measuring
from specwire.advise.options import AdviseOptions
from specwire.bench.accept import AcceptOptions
from specwire.bench.folder import check_folder, whole_file
from specwire.canary_config import changed
from specwire.cli import app
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig
from specwire.config_file import read_config_file
from specwire.config_layers import resolve
from specwire.errors import FailedPreconditionError
from specwire.messages import CoordinatorStatus, DraftCost, DrafterStatus, VerifyCost, VerifyRound
from tests.advise.test_advice import speculative
from tests.bench.conftest import K, Served

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"
_STEP_S = 0.004
_TOKEN_S = 0.004


def advise(served: Served, output: Path, *arguments: object) -> Result:
    fixed = ["--address", served.address, "--prompts", PROMPTS, "--num-prompts", 1, "--output-len", 60, "--concurrency", "1,8", "--repeats", 1]
    return CliRunner().invoke(
        app,
        [
            "advise",
            *map(str, [*fixed, "--step-len", 30, "--low-rate", 20, "--high-rate", 80, "--online-seconds", 0.1, "--output", output, *arguments]),
        ],
    )


def read(output: Path) -> Any:
    return json.loads((output / "advice.json").read_text())


def flat(_: VerifyRound) -> float:
    """A verifier that is slow, but for which more tokens cost nothing."""
    return _STEP_S


def by_token(round_: VerifyRound) -> float:
    """A verifier that pays for every token of a decode step."""
    return _TOKEN_S * sum(1 + len(row.draft_tokens) for row in round_.rows if not row.token_budget)


def test_drafts_pay_where_tokens_cost_nothing(served: Served, tmp_path: Path) -> None:
    served.verifier.script.delay_s = flat
    served.drafter.script.acceptance = 0.95
    result = advise(served, tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = read(tmp_path / "out")
    assert not report["leave_off"]
    assert report["num_speculative_tokens_per_batch_size"][0][::2] == [1, K]
    assert report["tokens_per_step_by_k"][K] == pytest.approx(report["acceptance"]["groups"][0]["acceptance_length"], rel=0.02)
    assert report["tokens_per_step_by_k"][1] == pytest.approx(1.95, abs=0.06)
    # Without cost tables nothing is known beyond what was measured.
    assert report["max_num_seqs"] == 8
    points = {(point["num_sequences"], point["num_requested"]): point for point in report["measured_steps"]}
    assert set(points) == {(size, k) for size in (1, 8) for k in (0, 1, K)}
    assert all(point["step_ms"] >= 1e3 * _STEP_S * 0.9 for point in points.values())
    assert all(point["num_drafts"] == pytest.approx(k, rel=0.2) for (_, k), point in points.items())
    assert report["verdict"] in ("on", "dynamic", "adaptive"), "by the machine's load"
    written = speculative((tmp_path / "out" / "specwire.yaml").read_text(), tmp_path)
    assert written.num_speculative_tokens == K
    page = (tmp_path / "out" / "advice.md").read_text()
    assert all(words in page for words in (report["headline"], "## 1. Workload", "| low | 1 |", "![advice](advice.png)", "![online](online.png)"))
    canary = resolve(CoordinatorConfig, "coordinator", [read_config_file(tmp_path / "out" / "canary.yaml")]).config
    assert (canary.canary_share, canary.speculative_config.num_speculative_tokens) == (0.1, K)
    changed(canary.speculative_config, canary.canary_config, K)
    assert report["headline"] in " ".join(result.stdout.split())
    assert (tmp_path / "out" / "specwire.yaml").read_text() in result.stdout, "to be pasted"
    for words in (
        "acceptance at position",
        "steps as they were measured",
        "expected throughput",
        "enable" if report["enable_adaptive_verification"] else "K = ",
    ):
        assert words in result.stdout
    assert {"date", "machine", "command"} <= set(report)
    begun = [line.partition(" ")[2].partition(":")[0] for line in result.stderr.splitlines() if line.endswith(" requests")]
    plain, rates = [f"plain, {number} at once" for number in (1, 3, 8)], [f"{name} rate, {k} drafts" for name in ("low", "high") for k in (0, K)]
    assert begun == ["acceptance", *plain, "steps", *rates], "there is no terminal for a bar"


def test_it_stops_where_hardly_a_draft_is_accepted(served: Served, tmp_path: Path) -> None:
    served.drafter.script.acceptance = 0.1
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "canary.yaml").write_text("of an earlier run")
    result = advise(served, tmp_path / "out", "--concurrency", "2", "--chat", "--categories", "qa,coding")
    assert result.exit_code == 0, result.output
    report = read(tmp_path / "out")
    assert (report["verdict"], report["leave_off"], report["measured_steps"], report["online"]) == ("stopped", True, [], [])
    assert report["acceptance"]["groups"][0]["acceptance_length"] < 1.5
    assert "leave speculation off: the mean acceptance length is 1." in " ".join(result.stdout.split())
    assert report["num_speculative_tokens_per_batch_size"] == [[1, 64, 0]]
    assert speculative((tmp_path / "out" / "specwire.yaml").read_text(), tmp_path).method is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["advice.json", "advice.md", "specwire.yaml"]
    page = (tmp_path / "out" / "advice.md").read_text()
    assert "## 5. Canary" in page
    assert advise_reports.without_pictures(page + "![a](a.png)\n") == page
    figures = advise_reports.summary(report)
    assert advise_reports.row("chat", figures)[-3:] == ["-", "-", "stopped"]


def test_leave_it_off_where_it_does_not_pay(served: Served, tmp_path: Path) -> None:
    """No draft is right, and each costs: whatever else the machine does meanwhile, nothing is gained by them."""
    served.verifier.script.delay_s = by_token
    served.drafter.script.acceptance = 0.0
    arguments = ["--concurrency", "4", "--output-len", "16", "--step-len", "12", "--categories", "qa,coding", "--keep-going"]
    result = advise(served, tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.output
    report = read(tmp_path / "out")
    assert (report["verdict"], report["leave_off"], report["canary"]) == ("off", True, None)
    assert len(report["online"]) == 2
    assert "leave speculation off: drafts " in " ".join(result.stdout.split())
    assert speculative((tmp_path / "out" / "specwire.yaml").read_text(), tmp_path).method is None


def test_the_best_of_several_stacks(served: Served, tmp_path: Path) -> None:
    """The same coordinator under another name is a candidate, too; on ties the first one counts."""
    other = f"unix:{Path(served.address.removeprefix('unix:')).resolve()}"
    result = advise(served, tmp_path / "out", "--categories", "qa", "--candidate", other, "--concurrency", "2", "--min-acceptance-length", "20")
    assert result.exit_code == 0, result.output
    report = read(tmp_path / "out")
    there = [candidate for candidate in report["candidates"] if candidate["address"]]
    assert [candidate["address"] for candidate in there] == [served.address, other]
    assert all(candidate["method"] == "scripted" and candidate["acceptance_length"] > 1.5 for candidate in there)
    assert "ngram" in [candidate["method"] for candidate in report["candidates"] if not candidate["address"]]
    assert "is the best of 2" in " ".join(result.stdout.split())


def test_tables_are_used_where_the_services_have_them(served: Served, tmp_path: Path) -> None:
    """So that sizes that were never measured are priced, too: the drafter says that it is dear from 16 sequences on."""
    lane, [link] = served.engine.lanes[0], served.engine.lanes[0].links
    lane.verify_cost = VerifyCost((1, 256), (4.0, 5.0))
    description = link.drafter.description
    assert description is not None
    costs = tuple(DraftCost(k, sequences, ms) for k in (1, 3) for sequences, ms in ((1, 0.1), (15, 0.1), (16, 200.0), (64, 200.0)))
    object.__setattr__(description, "draft_cost", costs)
    served.verifier.script.delay_s = flat
    result = advise(served, tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = read(tmp_path / "out")
    assert report["max_num_seqs"] == 64
    *_, last = report["num_speculative_tokens_per_batch_size"]
    assert last[1:] == [64, 0]
    assert 9 <= last[0] <= 16
    assert all(point["table_ms"] > 0 for point in report["measured_steps"])


def test_without_matplotlib_all_else_is_written(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    result = advise(served, tmp_path / "out", "--concurrency", "2")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()} - {"canary.yaml"}  # which is there if speculation is advised
    assert names == {"advice.json", "advice.md", "specwire.yaml"}
    assert "is not installed: install Specwire with the extra plots (in its folder: pip install '.[plots]')" in caplog.text


def test_the_coordinator_limits_k(served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A schedule of its own, which drafts nothing from 4 sequences on: what it hides is said, and nothing is made of it."""
    served.verifier.script.delay_s = flat  # a client that is kept waiting has all tokens of a faster one in one chunk
    lane = served.engine.lanes[0]
    lane.schedule._table = [0, 2, 2, 2, *[0] * 61]
    result = advise(served, tmp_path / "out", "--max-concurrency", 2)
    assert result.exit_code == 0, result.output
    report = read(tmp_path / "out")
    assert "with 8 requests at once and 3 drafts asked for, steps verified" in caplog.text
    assert any("no step verified more than 2 drafts, though 3 were asked for" in note for note in report["notes"])
    assert len(report["tokens_per_step_by_k"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "x"], "--concurrency is 'x'"),
        (["--concurrency", "0,4"], "--concurrency has 0"),
        (["--step-len", "4"], "--step-len is 4"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--min-gain", "-1"], "--min-gain is -1"),
        (["--min-acceptance-length", "0.5"], "--min-acceptance-length is 0.5"),
        (["--min-tpot-gain", "30"], "--min-tpot-gain is 30"),
        (["--canary-percent", "0"], "--canary-percent is 0"),
        (["--low-rate", "0"], "--low-rate is 0"),
        (["--low-rate", "5", "--high-rate", "2"], "--low-rate is 5.0, but must be below --high-rate 2.0"),
        (["--online-seconds", "-1"], "--online-seconds is -1"),
        (["--prompts", "none.jsonl"], "the prompt file none.jsonl can't be read"),
        (["--categories", "nocat"], "has no category 'nocat'"),
        (["--output", PROMPTS], "can't be written: "),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, tmp_path: Path) -> None:
    given = ["advise", "--prompts", str(PROMPTS), "--output", str(tmp_path / "out"), *map(str, arguments)]
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(("k", "connected"), [(0, True), (3, False)])
def test_a_coordinator_without_drafts(k: int, connected: bool, tmp_path: Path) -> None:
    options = AdviseOptions(AcceptOptions("x:1", PROMPTS), tmp_path)
    status = CoordinatorStatus("1", 0.0, True, num_speculative_tokens=k, drafters=(DrafterStatus("d:1", is_connected=connected),))
    with pytest.raises(FailedPreconditionError, match=r"drafts nothing, .* start it with a drafter"):
        Measuring(AsyncClient("unix:nobody"), options, status, asyncio.Event())


def test_requests_that_all_fail(served: Served, tmp_path: Path) -> None:
    result = advise(served, tmp_path / "out", "--output-len", 1000)
    assert result.exit_code == 1
    assert "all 8 requests failed: " in result.stderr


@pytest.mark.parametrize("num_rounds", [5, 90], ids=["acceptance", "steps"])
def test_ctrl_c_gives_no_advice(served: Served, tmp_path: Path, num_rounds: int) -> None:
    """Acceptance takes at most 60 rounds: one request."""
    sent = threading.Event()

    def interrupt(_: VerifyRound) -> float:
        if served.verifier.num_rounds >= num_rounds and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        return 0.05 if sent.is_set() else 0.0

    served.verifier.script.delay_s = interrupt
    result = advise(served, tmp_path / "out", "--categories", "qa", "--repeats", 50)
    assert result.exit_code == 130
    assert "interrupted before everything was measured" in result.stdout
    assert not list((tmp_path / "out").iterdir())


def test_files_are_whole_or_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "advice.json").write_text("of an earlier run")
    check_folder(tmp_path, ["advice.json", "advice.md"])
    writing = whole_file(tmp_path / "advice.json")
    writing.__enter__().write_text("{")
    assert not writing.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("advice.json", "of an earlier run")]
