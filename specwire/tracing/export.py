"""Spans to an OTLP collector over gRPC, and to a file as OTLP JSON lines (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding)."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from specwire.errors import InvalidArgumentError
from specwire.tracing.span import Span
from specwire.tracing.spec import BY_NAME, CLIENT, INTERNAL, SERVER, SERVICE_PREFIX
from specwire.version import build_version

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_SCOPE = "specwire"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {INTERNAL: SpanKind.INTERNAL, SERVER: SpanKind.SERVER, CLIENT: SpanKind.CLIENT}
_JSON_KINDS = {INTERNAL: 1, SERVER: 2, CLIENT: 3}
_JSON_OK, _JSON_ERROR = 1, 2
_JSON_LOCAL_PARENT, _JSON_REMOTE_PARENT = 0x100, 0x300


def make_resource(service: str, instance_id: str) -> Resource:
    """What all spans of a process have in common; OTEL_RESOURCE_ATTRIBUTES adds to it."""
    return Resource.create(
        {"service.name": f"{SERVICE_PREFIX}{service}", "service.instance.id": instance_id, "service.version": build_version()}
    )  # fmt: skip


class OtlpExporter:
    """Sends spans to a collector; OTEL_EXPORTER_OTLP_* set headers and certificates."""

    def __init__(self, endpoint: str, resource: Resource, timeout_s: float = _TIMEOUT_S) -> None:
        # OpenTelemetry takes an address without a scheme for one with TLS.
        self._exporter = OTLPSpanExporter(endpoint if "://" in endpoint else f"http://{endpoint}", timeout=timeout_s)
        self._resource = resource
        self._scope = InstrumentationScope(_SCOPE, build_version())
        # It reports every attempt; the tracer says once a period what got lost.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[Span]) -> bool:
        try:
            return self._exporter.export([self._to_readable(span) for span in spans]) is SpanExportResult.SUCCESS
        except Exception:
            logger.exception("%d spans could not be sent", len(spans))
            return False

    def shut(self) -> None:
        self._exporter.shutdown()

    def _to_readable(self, span: Span) -> ReadableSpan:
        error = span.error
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, is_remote=False),
            parent=_context(span.trace_id, span.parent_id, is_remote=span.is_parent_remote) if span.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.time_ns) for event in span.events],
            links=[Link(_context(trace_id, span_id, is_remote=False)) for trace_id, span_id in span.links],
            kind=_KINDS[BY_NAME[span.name].kind],
            status=Status(StatusCode.OK) if error is None else Status(StatusCode.ERROR, f"{error.code}: {error.message}"),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


class FileExporter:
    """Appends one ExportTraceServiceRequest a line. Each line is one write, so that services of one machine may share a file.

    Raises:
        InvalidArgumentError: the file can't be written.
    """

    def __init__(self, path: str, resource: Resource) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InvalidArgumentError(f"--trace-file is {path!r}, which can't be written ({error.strerror}); choose another file") from error
        self._path = path
        self._resource = {"attributes": _attributes(resource.attributes)}
        self._scope = {"name": _SCOPE, "version": build_version()}

    def export(self, spans: Sequence[Span]) -> bool:
        scope_spans = {"scope": self._scope, "spans": [_to_json(span) for span in spans]}
        request = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope_spans]}]}
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        try:
            return os.write(self._file, line) == len(line)
        except OSError as error:
            logger.debug("%s can't be written: %s", self._path, error)
            return False

    def shut(self) -> None:
        os.close(self._file)


def _context(trace_id: int, span_id: int, *, is_remote: bool) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, _SAMPLED)


def _to_json(span: Span) -> dict[str, Any]:
    json_span: dict[str, Any] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "flags": _JSON_REMOTE_PARENT if span.is_parent_remote else _JSON_LOCAL_PARENT,
        "name": span.name,
        "kind": _JSON_KINDS[BY_NAME[span.name].kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "status": {"code": _JSON_OK} if span.error is None else {"code": _JSON_ERROR, "message": f"{span.error.code}: {span.error.message}"},
    }
    if span.parent_id:
        json_span["parentSpanId"] = f"{span.parent_id:016x}"
    if span.links:
        json_span["links"] = [
            {"traceId": f"{trace_id:032x}", "spanId": f"{span_id:016x}", "flags": _JSON_LOCAL_PARENT} for trace_id, span_id in span.links
        ]
    if span.events:
        json_span["events"] = [
            {"timeUnixNano": str(event.time_ns), "name": event.name, "attributes": _attributes(event.attributes)} for event in span.events
        ]
    return json_span


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case str():
            return {"stringValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"arrayValue": {"values": [_value(item) for item in value]}}
