"""Spans to a file as OTLP JSON lines (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding)."""

import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from specwire.errors import InvalidArgumentError
from specwire.tracing.otlp import ERROR, KINDS, LOCAL, OK, REMOTE
from specwire.tracing.span import AttributeValue, Span
from specwire.tracing.spec import BY_NAME
from specwire.tracing.tracer import politely

logger = logging.getLogger(__name__)


class FileExporter:
    """Appends one ExportTraceServiceRequest a line. Each line is one write, so that services of one machine may share a file. What a full
    disk leaves of a line stays a line of its own.

    Raises:
        InvalidArgumentError: the file can't be written.
    """

    def __init__(self, path: str, resource: Mapping[str, AttributeValue], scope: str, version: str) -> None:
        try:
            # A pipe is not waited for until somebody reads it.
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError as error:
            reason = "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror
            raise InvalidArgumentError(f"--trace-file is {path!r}, which can't be written ({reason}); choose another file") from error
        os.set_blocking(self._file, True)
        self._is_torn = False
        self._path = path
        self._resource = {"attributes": _attributes(resource)}
        self._scope = {"name": scope, "version": version}

    def export(self, spans: Sequence[Span]) -> bool:
        scope_spans = {"scope": self._scope, "spans": [_to_json(span) for span in politely(spans)]}
        request = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope_spans]}]}
        line = b"\n" * self._is_torn + json.dumps(request, separators=(",", ":")).encode() + b"\n"
        try:
            num_written = os.write(self._file, line)
        except OSError as error:
            logger.debug("%s can't be written: %s", self._path, error)
            return False
        if num_written:
            self._is_torn = line[num_written - 1 : num_written] != b"\n"
        return num_written == len(line)

    def shut(self) -> None:
        os.close(self._file)


def _to_json(span: Span) -> dict[str, Any]:
    json_span: dict[str, Any] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "flags": REMOTE if span.is_parent_remote else LOCAL,
        "name": span.name,
        "kind": KINDS[BY_NAME[span.name].kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "status": {"code": OK} if span.error is None else {"code": ERROR, "message": f"{span.error.code}: {span.error.message}"},
    }
    if span.parent_id:
        json_span["parentSpanId"] = f"{span.parent_id:016x}"
    if span.links:
        json_span["links"] = [{"traceId": f"{trace_id:032x}", "spanId": f"{span_id:016x}", "flags": LOCAL} for trace_id, span_id in span.links]
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
