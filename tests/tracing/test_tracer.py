"""The way out of the process: never waited for, bounded, and what is lost is counted and said."""

import json
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from specwire.errors import CancelledError, InternalError, InvalidArgumentError
from specwire.messages import RoundTiming, VerifyRound
from specwire.tracing import Span, SpanError, SpanEvent, Tracer, error_of, open_tracer, record_round
from specwire.tracing.export import FileExporter
from specwire.tracing.otlp import make_request
from specwire.tracing.resource import make_resource
from specwire.version import build_version
from tests.tracing.collector import collecting

TIMEOUT_S = 60.0
BOUNDED_S = 30.0
"""Well above what closing may take, well below what a hung call would."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go to the collector without the 5 s that they may wait for others."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def span(number: int = 1, **changes: Any) -> Span:
    return Span("step", 1 << 100 | number, number, 3, False, 1_000, 2_000, {"specwire.choice": 0})._replace(**changes)


class Kept:
    """Keeps spans; hangs while `gate` is clear."""

    def __init__(self, is_working: bool = True) -> None:
        self.spans: list[Span] = []
        self.threads: set[int] = set()
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.is_shut = False
        self._is_working = is_working

    def export(self, spans: Sequence[Span]) -> bool:
        self.threads.add(threading.get_ident())
        self.entered.set()
        self.gate.wait(TIMEOUT_S)
        self.spans += spans
        return self._is_working

    def shut(self) -> None:
        self.is_shut = True
        self.gate.set()


def test_spans_arrive_in_order_and_on_another_thread() -> None:
    exporters = [Kept(), Kept()]
    tracer = Tracer(exporters, gather_s=0)
    for number in range(1, 2001):
        tracer.record(1, lambda number=number: [span(number)])  # type: ignore[misc]
    tracer.close(TIMEOUT_S)
    for exporter in exporters:
        assert [span.span_id for span in exporter.spans] == list(range(1, 2001))
        assert threading.get_ident() not in exporter.threads
        assert exporter.is_shut
    assert (tracer.num_recorded, tracer.num_dropped, tracer.num_failed) == (2000, 0, 0)


def test_a_hung_exporter_holds_up_nobody_and_what_does_not_fit_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Kept()
    exporter.gate.clear()
    tracer = Tracer([exporter], max_queued=100, gather_s=0)
    tracer.record(1, lambda: [span()])
    assert exporter.entered.wait(TIMEOUT_S)
    for _ in range(500):
        tracer.record(2, lambda: [span(), span()])
    assert (tracer.num_recorded, tracer.num_dropped) == (1001, 800)
    with caplog.at_level(logging.WARNING):
        started_s = time.monotonic()
        tracer.close(0.1)
    assert time.monotonic() - started_s < BOUNDED_S
    assert exporter.is_shut
    assert "of 1001 spans were lost: 800 found the queue full" in caplog.text
    tracer.record(1, lambda: [span()])
    assert tracer.num_dropped == 801


def test_failures_are_counted_and_told_once_a_period(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Kept(is_working=False)
    tracer = Tracer([exporter, Kept()], gather_s=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tracer.record(1, lambda: [span()])
            assert exporter.entered.wait(TIMEOUT_S)
            exporter.entered.clear()
        tracer.close()
    assert tracer.num_failed == 3
    assert caplog.text.count("could not be exported; is the collector there") == 1
    assert "3 of 3 spans were lost" in caplog.text


def test_a_span_that_can_not_be_built_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Kept()
    tracer = Tracer([exporter])
    tracer.record(1, lambda: [span(1)])
    tracer.record(1, lambda: [span(1 // 0)])
    tracer.record(1, lambda: [span(2)])
    tracer.close(TIMEOUT_S)
    assert [span.span_id for span in exporter.spans] == [1, 2]
    assert tracer.num_failed == 1
    assert "ZeroDivisionError" in caplog.text


def test_nothing_to_take_spans_means_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    assert open_tracer("verifier", "v", endpoint="", file="") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer = open_tracer("verifier", "v", endpoint="", file="")
    assert tracer is not None
    tracer.close()


SPANS = [
    span(1),
    span(
        2,
        parent_id=0,
        name="generate",
        attributes={
            "specwire.request_id": "é",
            "x": True,
            "y": -1.5,
            "n": -7,
            "big": 1 << 62,
            "long": "é" * 300,
            "z": ["stop", "length"],
            "e": [],
            "i": [1, 2],
        },
    ),
    span(3, is_parent_remote=True, name="forward", error=SpanError("INTERNAL", "it broke"), links=[(5, 6), (7, 8)]),
    span(4, name="propose", events=[SpanEvent("fallback", 1_500, {"specwire.cause": "drafter_timeout"})], error=error_of(CancelledError("gone"))),
]


def from_json(line: str) -> ExportTraceServiceRequest:
    """OTLP JSON has hexadecimal ids, protobuf's own JSON has base64."""

    def convert(node: Any) -> Any:
        if isinstance(node, list):
            return [convert(item) for item in node]
        if not isinstance(node, dict):
            return node
        ids = ("traceId", "spanId", "parentSpanId")
        return {key: json_format.MessageToDict(_bytes(value)) if key in ids else convert(value) for key, value in node.items()}

    return json_format.ParseDict(convert(json.loads(line)), ExportTraceServiceRequest())


def _bytes(text: str) -> Any:
    from google.protobuf.wrappers_pb2 import BytesValue

    return BytesValue(value=bytes.fromhex(text))


def to_readable(span: Span, resource: Resource) -> ReadableSpan:
    """As OpenTelemetry's SDK would have it."""

    def context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote, TraceFlags(1))

    return ReadableSpan(
        name=span.name,
        context=context(span.trace_id, span.span_id),
        parent=context(span.trace_id, span.parent_id, is_remote=span.is_parent_remote) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.time_ns) for event in span.events],
        links=[Link(context(*link)) for link in span.links],
        kind={"generate": SpanKind.SERVER, "forward": SpanKind.SERVER, "propose": SpanKind.CLIENT}.get(span.name, SpanKind.INTERNAL),
        status=Status(StatusCode.OK) if span.error is None else Status(StatusCode.ERROR, f"{span.error.code}: {span.error.message}"),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("specwire", build_version()),
    )


def test_file_and_collector_get_the_same(tmp_path: Path) -> None:
    resource = make_resource("verifier", "v-1")
    path = tmp_path / "traces.jsonl"
    exporter = FileExporter(str(path), resource, "specwire", build_version())
    assert exporter.export(SPANS[:2])
    assert exporter.export(SPANS)
    exporter.shut()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    expected = encode_spans([to_readable(span, Resource(resource)) for span in SPANS])
    assert ExportTraceServiceRequest.FromString(make_request(SPANS, resource, "specwire", build_version())) == expected
    assert from_json(lines[1]) == expected
    names = {attribute.key: attribute.value.string_value for attribute in expected.resource_spans[0].resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("specwire-verifier", "v-1")
    assert names["service.version"]


def test_a_line_that_a_full_disk_cuts_off_spoils_no_other(tmp_path: Path) -> None:
    """The largest file that the process may write stands for the disk."""
    path = tmp_path / "traces.jsonl"
    exporter = FileExporter(str(path), make_resource("verifier", "v-1"), "specwire", build_version())
    assert exporter.export(SPANS)
    length = path.stat().st_size
    old, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (length + length // 2, old[1]))
        assert not exporter.export(SPANS), "a short write"
        assert not exporter.export(SPANS), "no write at all"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert exporter.export(SPANS)
    assert exporter.export(SPANS)
    exporter.shut()
    first, torn, *rest = path.read_text(encoding="utf-8").splitlines()
    assert first.startswith(torn)
    assert rest == [first, first]


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidArgumentError, match="nobody reads this pipe"):
        FileExporter(str(path), {}, "specwire", "1")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    exporter = FileExporter(str(path), {}, "specwire", "1")
    assert exporter.export(SPANS)
    exporter.shut()
    assert os.read(reader, 1 << 16).endswith(b"\n")
    os.close(reader)


def test_services_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "traces.jsonl")
    tracers = [open_tracer(service, service, endpoint="", file=path) for service in ("coordinator", "verifier", "drafter")]
    for number in range(1, 301):
        for tracer in tracers:
            assert tracer is not None
            tracer.record(1, lambda number=number: [span(number)])  # type: ignore[misc]
            if number % 100 == 0:
                tracer._closing.wait(0.01)  # more batches than one
    for tracer in tracers:
        assert tracer is not None
        tracer.close(TIMEOUT_S)
    requests = [from_json(line) for line in Path(path).read_text().splitlines()]
    assert sum(len(request.resource_spans[0].scope_spans[0].spans) for request in requests) == 900


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--trace-file is .*nowhere.*No such file"):
        open_tracer("verifier", "v", endpoint="", file=str(tmp_path / "nowhere" / "file"))


def test_rounds_have_a_span_in_each_trace() -> None:
    exporter = Kept()
    tracer = Tracer([exporter])
    traceparents = (f"00-{9:032x}-{5:016x}-01", "nonsense", f"00-{9:032x}-{6:016x}-00", f"00-{10:032x}-{7:016x}-01")
    timing, error = RoundTiming(1_000_000, 3_000_000, 7_000_000), InternalError("x")
    record_round(tracer, "forward", VerifyRound(1, 4, 6, traceparents=traceparents), timing, error, lambda _: {})
    tracer.close(TIMEOUT_S)
    assert [(s.trace_id, s.parent_id, s.is_parent_remote) for s in exporter.spans] == [(9, 5, True), (10, 7, True)]
    assert all((s.start_ns, s.end_ns, s.error) == (3_000_000, 7_000_000, ("INTERNAL", "x")) for s in exporter.spans)
    assert exporter.spans[0].attributes == {"specwire.lane": 4, "specwire.round": 6, "specwire.num_rows": 0, "specwire.wait_ms": 2.0}
    assert tracer.num_bad_traceparents == 1


def test_collector_that_hangs_is_left_at_the_end(caplog: pytest.LogCaptureFixture, hasty: None) -> None:
    with collecting() as collector:
        collector.released.clear()
        tracer = open_tracer("drafter", "d", endpoint=collector.address, file="")
        assert tracer is not None
        tracer.record(1, lambda: [span()])
        assert collector.called.wait(TIMEOUT_S)
        tracer.record(1, lambda: [span()])
        started_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - started_s < BOUNDED_S
        assert "2 of 2 spans were lost" in caplog.text
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "dead"])
def test_collector_that_does_not_take_spans(is_refused: bool, caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        collector.code = grpc.StatusCode.INVALID_ARGUMENT
        address = collector.address if is_refused else f"127.0.0.1:{nobody.getsockname()[1]}"
        tracer = open_tracer("drafter", "d", endpoint=address, file="")
        assert tracer is not None
        tracer.record(1, lambda: [span()])
        started_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - started_s < BOUNDED_S
    assert "1 of 1 spans were lost" in caplog.text


def test_collector_gets_spans_over_grpc(hasty: None) -> None:
    with collecting() as collector:
        tracer = open_tracer("coordinator", "c-7", endpoint=f"http://{collector.address}", file="")
        assert tracer is not None
        tracer.record(len(SPANS), lambda: SPANS)
        seen = collector.wait_for(lambda spans: len(spans) == len(SPANS))
        tracer.close()
    assert [(s.name, s.service, s.instance) for s in seen] == [(s.name, "coordinator", "c-7") for s in SPANS]
    assert [s.is_ok for s in seen] == [True, True, False, False]
    assert seen[3].message == "CANCELLED: gone"


def test_giving_up_in_the_middle_of_much_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector:
        collector.released.clear()
        tracer = open_tracer("drafter", "d", endpoint=collector.address, file="")
        assert tracer is not None
        for _ in range(12_000):
            tracer.record(1, lambda: [span()])
        tracer.close(0.02)
    assert [record.levelname for record in caplog.records if "spans" in record.message and "go to" not in record.message] == ["WARNING"]
    assert "of 12000 spans were lost" in caplog.text
