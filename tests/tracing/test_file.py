"""Traces in a file: what a collector would get, line by line, whatever the file is."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from specwire.errors import InvalidArgumentError
from specwire.tracing import Span, open_tracer
from specwire.tracing.export import FileExporter
from specwire.tracing.otlp import make_request
from specwire.tracing.resource import make_resource
from specwire.version import build_version
from tests.tracing.examples import SPANS, span

TIMEOUT_S = 60.0


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
