"""Spans as OTLP messages. OpenTelemetry's own encoder takes four times as long, which is what most of a traced step would cost."""

import functools
from collections.abc import Mapping, Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as PbSpan

from specwire.tracing.span import AttributeValue, Span
from specwire.tracing.spec import BY_NAME, CLIENT, INTERNAL, SERVER

LOCAL, REMOTE = 0x100, 0x300
"""Flags that say where a span's parent, or a link's span, is from (SpanFlags of OTLP)."""
KINDS = {INTERNAL: 1, SERVER: 2, CLIENT: 3}
OK, ERROR = 1, 2
_STATUS_OK = Status(code=OK)  # type: ignore[arg-type]  # the stubs take no numbers for enums
_REPEATED = (int, str, bool)


def make_request(spans: Sequence[Span], resource: Mapping[str, AttributeValue], scope: str, version: str) -> ExportTraceServiceRequest:
    """What a collector takes.

    Args:
        resource: attributes of the process.
        scope, version: of the instrumentation.
    """
    scope_spans = ScopeSpans(scope=InstrumentationScope(name=scope, version=version), spans=map(_span, spans))
    attributes = [_attribute(key, value) for key, value in resource.items()]
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=Resource(attributes=attributes), scope_spans=[scope_spans])])


def _span(span: Span) -> PbSpan:
    error = span.error
    return PbSpan(
        trace_id=span.trace_id.to_bytes(16, "big"),
        span_id=span.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
        flags=REMOTE if span.is_parent_remote else LOCAL,
        name=span.name,
        kind=KINDS[BY_NAME[span.name].kind],  # type: ignore[arg-type]
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_attributes(span.attributes),
        events=[PbSpan.Event(time_unix_nano=event.time_ns, name=event.name, attributes=_attributes(event.attributes)) for event in span.events],
        links=[_link(*link) for link in span.links],
        status=_STATUS_OK if error is None else Status(code=ERROR, message=f"{error.code}: {error.message}"),  # type: ignore[arg-type]
    )


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[KeyValue]:
    return [_known_attribute(key, value) if type(value) in _REPEATED else _attribute(key, value) for key, value in attributes.items()]


def _attribute(key: str, value: AttributeValue) -> KeyValue:
    return KeyValue(key=key, value=_value(value))


_known_attribute = functools.lru_cache(maxsize=4096, typed=True)(_attribute)
"""Of values that come again and again: small numbers and addresses."""


@functools.lru_cache(maxsize=1024)
def _link(trace_id: int, span_id: int) -> PbSpan.Link:
    return PbSpan.Link(trace_id=trace_id.to_bytes(16, "big"), span_id=span_id.to_bytes(8, "big"), flags=LOCAL)


def _value(value: AttributeValue) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case str():
            return AnyValue(string_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(item) for item in value]))
