"""Spans as OTLP messages, in protobuf's wire format (https://protobuf.dev/programming-guides/encoding/).

Written by hand: OpenTelemetry's own encoder takes ten times as long, and would be most of what a traced step costs. Numbers of fields are those of
opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.
"""

import functools
import struct
from collections.abc import Iterable, Mapping

from specwire.tracing.span import AttributeValue, Span, SpanError, SpanEvent
from specwire.tracing.spec import BY_NAME, CLIENT, INTERNAL, SERVER

LOCAL, REMOTE = 0x100, 0x300
"""Flags that say where a span's parent, or a link's span, is from (SpanFlags of OTLP)."""
KINDS = {INTERNAL: 1, SERVER: 2, CLIENT: 3}
OK, ERROR = 1, 2

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_REPEATED = (int, str, bool)


def make_request(spans: Iterable[Span], resource: Mapping[str, AttributeValue], scope: str, version: str) -> bytes:
    """An ExportTraceServiceRequest: what a collector takes.

    Args:
        resource: attributes of the process.
        scope, version: of the instrumentation.
    """
    scope_spans = _field(1, _text(1, scope) + _text(2, version)) + b"".join([_field(2, _span(span)) for span in spans])
    attributes = b"".join(_attribute(1, key, value) for key, value in resource.items())
    return _field(1, _field(1, attributes) + _field(2, scope_spans))


def _span(span: Span) -> bytes:
    parts = [_TRACE_ID, span.trace_id.to_bytes(16, "big"), _SPAN_ID, span.span_id.to_bytes(8, "big")]
    if span.parent_id:
        parts += (_PARENT_ID, span.parent_id.to_bytes(8, "big"))
    parts += (_NAMES[span.name], _TIMES.pack(_START, span.start_ns, _END, span.end_ns))
    parts += _attributes(9, span.attributes)
    parts += [_event(event) for event in span.events]
    parts += [_link(*link) for link in span.links]
    parts += (_STATUS_OK if span.error is None else _status(span.error), _REMOTE_PARENT if span.is_parent_remote else _LOCAL_PARENT)
    return b"".join(parts)


def _attributes(number: int, attributes: Mapping[str, AttributeValue]) -> list[bytes]:
    return [
        _known_attribute(number, key, value) if type(value) in _REPEATED else _attribute(number, key, value) for key, value in attributes.items()
    ]  # fmt: skip


def _attribute(number: int, key: str, value: AttributeValue) -> bytes:
    """A KeyValue as field `number` of its owner."""
    return _field(number, _text(1, key) + _field(2, _value(value)))


_known_attribute = functools.lru_cache(maxsize=4096, typed=True)(_attribute)
"""Of values that come again and again: small numbers and addresses."""


def _value(value: AttributeValue) -> bytes:
    """An AnyValue."""
    match value:
        case bool():
            return _tag(2, _VARINT) + _varint(value)
        case str():
            return _text(1, value)
        case int():
            return _tag(3, _VARINT) + _varint(value)
        case float():
            return _tag(4, _FIXED64) + struct.pack("<d", value)
    return _field(5, b"".join(_field(1, _value(item)) for item in value))


def _event(event: SpanEvent) -> bytes:
    time = _tag(1, _FIXED64) + struct.pack("<Q", event.time_ns)
    return _field(11, time + _text(2, event.name) + b"".join(_attributes(3, event.attributes)))


@functools.lru_cache(maxsize=1024)
def _link(trace_id: int, span_id: int) -> bytes:
    return _field(13, _field(1, trace_id.to_bytes(16, "big")) + _field(2, span_id.to_bytes(8, "big")) + _flags(6, LOCAL))


def _status(error: SpanError) -> bytes:
    return _field(15, _text(2, f"{error.code}: {error.message}") + _tag(3, _VARINT) + _varint(ERROR))


def _flags(number: int, flags: int) -> bytes:
    return _tag(number, _FIXED32) + struct.pack("<I", flags)


def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _field(number: int, content: bytes) -> bytes:
    """A field of text, bytes or a message."""
    return _tag(number, _BYTES) + _varint(len(content)) + content


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


@functools.lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # negative numbers are their two's complement
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_TRACE_ID, _SPAN_ID, _PARENT_ID = _tag(1, _BYTES) + _varint(16), _tag(2, _BYTES) + _varint(8), _tag(4, _BYTES) + _varint(8)
_NAMES = {name: _text(5, name) + _tag(6, _VARINT) + _varint(KINDS[spec.kind]) for name, spec in BY_NAME.items()}
_TIMES = struct.Struct("<cQcQ")
_START, _END = _tag(7, _FIXED64), _tag(8, _FIXED64)
_STATUS_OK = _field(15, _tag(3, _VARINT) + _varint(OK))
_LOCAL_PARENT, _REMOTE_PARENT = _flags(16, LOCAL), _flags(16, REMOTE)
