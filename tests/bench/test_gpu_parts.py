"""What the GPU benchmarks compute from what they measured."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.breakdown import break_down
from benchmarks.gpu.feature_traffic import FeatureTraffic
from benchmarks.gpu.schedule import best_k, choose_schedule
from benchmarks.gpu.slices import Slices, describe_command, make_parser
from specwire.cli.trace import FileSpan
from specwire.messages import DraftCost, VerifyCost
from specwire.policy.cost import StepCost

RATES = (0.8, 0.64, 0.512, 0.41, 0.328)


def make_cost(draft_ms: float) -> StepCost:
    """Flat up to 128 tokens, then steep; drafting takes as long for each position, whatever the batch."""
    verify = VerifyCost(num_tokens=(1, 128, 256, 512, 1536), step_ms=(4.0, 4.6, 6.0, 12.0, 35.0), max_graph_tokens=1536)
    return StepCost.from_tables(verify, [DraftCost(k, seqs, draft_ms * k) for k in (1, 3, 5) for seqs in (1, 256)])


def test_schedule_drafts_less_as_the_batch_grows() -> None:
    schedule = choose_schedule(make_cost(0.3), RATES, 256, 576)
    assert schedule[0][0] == 1
    assert schedule[-1][1] == 256
    assert [first for first, _, _ in schedule[1:]] == [last + 1 for _, last, _ in schedule[:-1]]
    assert schedule[0][2] == 5  # a flat cost curve: drafts are nearly free
    assert schedule[-1][2] < 3


def test_drafts_that_cost_more_than_they_save_are_not_chosen() -> None:
    assert choose_schedule(make_cost(50.0), RATES, 256, 576) == ((1, 256, 0),)
    assert best_k(make_cost(0.01), (1.0,) * 5, 1, 576) == 5


def span(name: str, span_id: str, parent: str, start_ms: float, end_ms: float, **attributes: Any) -> FileSpan:
    named = {f"specwire.{key}": value for key, value in attributes.items()}
    return FileSpan("t", span_id, parent, name, "", int(start_ms * 1e6), int(end_ms * 1e6), named, (), 0, "")


def step(number: int, start_ms: float, *, num_tokens: int = 1) -> list[FileSpan]:
    """1 ms planning, 2 ms drafts (1.5 at the drafter, 0.5 of them reading features), 0.5 ms each way, 0.25 ms in a queue, 4 ms forward, 0.1 ms
    until the answer is taken."""
    return [
        span("step", f"s{number}", "root", start_ms, start_ms + 8.35, step=number, num_tokens=num_tokens),
        span("propose", f"p{number}", f"s{number}", start_ms + 0.5, start_ms + 2.5),
        span("draft", f"d{number}", f"p{number}", start_ms + 0.75, start_ms + 2.25),
        span("features", f"r{number}", f"p{number}", start_ms + 0.75, start_ms + 1.25),
        span("verify", f"v{number}", f"s{number}", start_ms + 3, start_ms + 8.25),
        span("forward", f"f{number}", f"v{number}", start_ms + 3.75, start_ms + 7.75, wait_ms=0.25),
    ]


def test_breakdown_of_steps() -> None:
    spans = [each for number in range(1, 6) for each in step(number, 10.0 * number)]
    arrivals = [(int((10 * number + 9) * 1e6), number) for number in range(1, 6)]
    assert break_down(spans, arrivals) == {
        "plan_ms": 1.0, "propose_ms": 2.0, "draft_ms": 1.5, "features_ms": 0.5,
        "hop_ms": 1.0, "queue_ms": 0.25, "forward_ms": 4.0, "commit_ms": 0.1, "stream_ms": 0.65, "period_ms": 10.0,
        "num_steps": 4,
    }  # fmt: skip


def test_spans_of_the_drafter_may_be_missing() -> None:
    spans = [each for number in range(1, 6) for each in step(number, 10.0 * number) if each.name not in ("draft", "features")]
    arrivals = [(int((10 * number + 9) * 1e6), number) for number in range(1, 6)]
    found = break_down(spans, arrivals)
    assert (found["propose_ms"], found["draft_ms"], found["features_ms"]) == (2.0, 0.0, 0.0)


def test_feature_traffic_is_what_came_since() -> None:
    def text(num_bytes: int, seconds: float, count: int) -> str:
        lines = ["# TYPE specwire_drafter_feature_bytes_total counter", f'specwire_drafter_feature_bytes_total{{path="memory"}} {num_bytes}']
        lines += [
            f'specwire_drafter_feature_seconds_sum{{path="memory"}} {seconds}',
            f'specwire_drafter_feature_seconds_count{{path="memory"}} {count}',
        ]
        return "\n".join([*lines, 'specwire_drafter_feature_seconds_count{path="grpc"} 0', "specwire_drafter_ready 1", ""])

    before, after = FeatureTraffic.parse(text(1000, 0.5, 10)), FeatureTraffic.parse(text(9000, 0.7, 30))
    assert after.since(before) == {"memory": {"reads": 20.0, "bytes_per_read": 400.0, "ms_per_read": pytest.approx(10.0)}}


def test_breakdown_wants_every_step() -> None:
    with pytest.raises(AssertionError, match="step 2 of the traced request has no span"):
        break_down([*step(1, 10), *step(3, 30)], [(int(1e9), 9)])


def test_commands_name_no_folder() -> None:
    arguments = ["--out", "/tmp/x/out", "--model=/srv/models/m.gguf", "--only", "a/b", 'early:{"a": true}']
    assert describe_command("engine", arguments) == "python -m benchmarks.gpu.engine --out out --model=m.gguf --only a/b 'early:{\"a\": true}'"


def make_slices(folder: Path, *arguments: str) -> tuple[Slices, argparse.Namespace]:
    return Slices.parse("x", make_parser("", {"a": 1, "b": 1}), ["--device", "cpu", "--tiny", "--out", str(folder), *arguments])


def test_only_complete_slices_of_the_same_commit_are_left_out(tmp_path: Path) -> None:
    slices, _ = make_slices(tmp_path, "--commit", "one")
    with slices.open("a") as part:
        part.add({"value": 1.0})
    broken = slices.open("b")
    broken.add({"value": 1.0})
    broken.__exit__(ValueError, ValueError(), None)
    assert slices.pending() == ["b"]
    assert make_slices(tmp_path, "--commit", "one", "--again")[0].pending() == ["a", "b"]
    assert make_slices(tmp_path, "--commit", "two")[0].pending() == ["a", "b"]


def test_tiny_figures_do_not_lie_among_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit, match="--tiny needs --out"):
        Slices.parse("x", make_parser("", {"a": 1}), ["--device", "cpu", "--tiny"])
    with pytest.raises(SystemExit, match="add --tiny"):
        Slices.parse("x", make_parser("", {"a": 1}), ["--device", "cpu"])
