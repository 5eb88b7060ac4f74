"""Services as processes that share a trace file, and the command that shows it."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specwire import Client
from specwire.cli import app
from specwire.cli.trace import FileSpan, Trace, group, read_spans
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.tracing.spec import BY_NAME
from tests.engine.tiny_models import save_tiny_model
from tests.integration.stack import Service
from tests.integration.tiny import verifier_config


def show(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["trace", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What three requests to processes have left; the processes were stopped by SIGTERM."""
    folder = tmp_path_factory.mktemp("t")
    save_tiny_model(folder / "tiny")
    path = folder / "traces.jsonl"
    listen = {name: f"unix:{folder}/{name}" for name in ("v", "d", "c")}
    services = [
        Service(verifier_config(folder / "tiny", listen=(listen["v"],), trace_file=str(path))),
        Service(DrafterConfig(listen=(listen["d"],), trace_file=str(path))),
        Service(
            CoordinatorConfig(
                listen=(listen["c"],), verifiers=(listen["v"],), drafters=(listen["d"],), min_draft_wait_ms=60_000, trace_file=str(path)
            )
        ),
    ]  # fmt: skip
    try:
        for service in services:
            service.start()
        with Client(listen["c"]) as client:
            client.wait_ready(90)
            for number in range(3):
                client.generate([10, 11, 12, 10, 11, 12], seed=number, max_tokens=12, ignore_eos=True, request_id=f"r{number % 2}")
        assert [service.stop() for service in reversed(services)] == [0, 0, 0]
    finally:
        for service in services:
            if service.is_running:
                service.kill()
    return path


def test_every_process_has_written_its_spans(file: Path) -> None:
    spans, num_bad_lines = read_spans(file)
    assert num_bad_lines == 0
    traces = group(spans)
    assert [trace.request_id for trace in traces] == ["r0", "r1", "r0"]
    for trace in traces:
        assert {span.name for span in trace.spans} == set(BY_NAME) - {"features", "http"}, "drafts of a lookup need no features"
        assert {span.service for span in trace.spans} == {"coordinator", "drafter", "verifier"}
        assert not [span for span in trace.spans if span.error]
        by_id = {span.span_id: span for span in trace.spans}
        for span in trace.spans:
            assert span is trace.root or by_id[span.parent_id].name in BY_NAME[span.name].parents


def test_tree(file: Path) -> None:
    lines = show(str(file), "--last").splitlines()
    trace = group(read_spans(file)[0])[-1]
    assert lines[0] == f"trace {trace.trace_id}"
    assert len(lines) == 1 + len(trace.spans)
    assert lines[1].startswith(f"└── generate {trace.root.duration_ms:.2f} ms +0.00 coordinator request_id=r0 num_choices=1")
    for span in trace.spans:
        [line] = [line for line in lines if f"{span.name} {span.duration_ms:.2f} ms +{(span.start_ns - trace.root.start_ns) / 1e6:.2f}" in line]
        depth = {"generate": 0, "queue": 1, "prefill": 1, "step": 1, "propose": 2, "verify": 2, "draft": 3, "forward": 3}[span.name]
        assert line.index(span.name) == 4 * (depth + 1)
        assert f" {span.service} " in line


def test_choice_of_traces(file: Path) -> None:
    traces = group(read_spans(file)[0])
    assert show(str(file), "--request", "r0").count(" generate ") == 2
    assert show(str(file), "--request", "r0", "--last").count(" generate ") == 1
    assert show(str(file), "--trace-id", traces[1].trace_id[:8].upper()).splitlines()[0] == f"trace {traces[1].trace_id}"
    table = show(str(file))
    for trace in traces:
        [line] = [line for line in table.splitlines() if line.startswith(trace.trace_id)]
        assert line.split()[1:] == [
            trace.request_id, f"{trace.root.duration_ms:.1f}", "12", str(len(trace.spans)), "coordinator", "drafter", "verifier", "length"
        ]  # fmt: skip
    assert "3 traces" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "nowhere can't be read"), (["FILE", "--request", "r9"], "no trace of 'r9'"), (["FILE", "--trace-id", "zz"], "no trace of 'zz'")],
)
def test_nothing_to_show(file: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.cli.trace._PATIENCE_S", 0.0)
    result = CliRunner().invoke(app, ["trace", *(str(file) if argument == "FILE" else argument for argument in arguments)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_a_request_that_just_ended_is_waited_for(tmp_path: Path, file: Path) -> None:
    late = tmp_path / "late.jsonl"
    late.touch()
    timer = threading.Timer(0.3, lambda: late.write_bytes(file.read_bytes()))
    timer.start()
    assert "generate" in show(str(late), "--last")
    timer.join()


def test_a_damaged_file_shows_what_it_has(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed service leaves half a line; parents that were lost are said to be."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    [coordinator] = [line for line in lines if '"name":"generate"' in line and '"name":"step"' in line][:1]
    request = json.loads(coordinator)
    spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans[:] = [span for span in spans if span["name"] in ("generate", "verify")]
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('["no", "span"]\n' + json.dumps(request) + "\n" + lines[0][:100], encoding="utf-8")
    text = show(str(damaged), "--last")
    assert text.startswith(f"2 lines of {damaged} are no OTLP JSON")
    assert "is not in the file)" in text
    (tmp_path / "empty").touch()
    monkeypatch.setattr("specwire.cli.trace._PATIENCE_S", 0.0)
    assert CliRunner().invoke(app, ["trace", str(tmp_path / "empty")]).exit_code == 1


def test_a_trace_that_goes_in_circles_ends() -> None:
    from specwire.cli.trace import make_tree
    from specwire.errors import InvalidArgumentError

    spans = [FileSpan("t", one, other, "step", "coordinator", 1, 2, {}, (), 0, "") for one, other in (("a", "b"), ("b", "a"))]
    with pytest.raises(InvalidArgumentError, match="damaged"):
        make_tree(Trace("t", spans))
    assert Counter(span.name for span in spans) == {"step": 2}
