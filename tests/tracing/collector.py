"""An OTLP collector of the tests' own: a real gRPC TraceService that keeps what it gets, and can be slow, hang or refuse."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from specwire.tracing.spec import BY_NAME, SERVICE_PREFIX

_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as a collector gets it; ids are hexadecimal, parent_id is empty for a root."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    code: int
    message: str

    @property
    def is_ok(self) -> bool:
        return self.code == Status.STATUS_CODE_OK


class Collector(pb_grpc.TraceServiceServicer):
    """Attributes: released: while it is clear, calls hang; codes: what the next calls end with; code: what all after them end with;
    num_rejected: spans of each call that it says it did not take; metadata: of the last call."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.released.set()
        self.codes: list[grpc.StatusCode] = []
        self.code = grpc.StatusCode.OK
        self.num_rejected = 0
        self.metadata: dict[str, Any] = {}
        self.num_calls = 0
        self.called = threading.Event()
        self.address = ""
        self._spans: list[Seen] = []
        self._news = threading.Condition()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.num_calls += 1
        self.called.set()
        self.released.wait(_WAIT_S)
        self.metadata = dict(context.invocation_metadata())
        code = self.codes.pop(0) if self.codes else self.code
        if code is not grpc.StatusCode.OK:
            context.abort(code, "the test says so")
        with self._news:
            self._spans += seen_in(request)
            self._news.notify_all()
        refused = pb.ExportTracePartialSuccess(rejected_spans=self.num_rejected, error_message="the test says so")
        return pb.ExportTraceServiceResponse(partial_success=refused if self.num_rejected else None)

    @property
    def spans(self) -> list[Seen]:
        with self._news:
            return list(self._spans)

    def wait_for(self, condition: Callable[[list[Seen]], bool]) -> list[Seen]:
        """All spans, once they are as they should be; blocks, so call it in a thread where a loop runs."""
        with self._news:
            assert self._news.wait_for(lambda: condition(self._spans), _WAIT_S), f"only {len(self._spans)} spans came"
            return list(self._spans)


@contextmanager
def collecting(credentials: grpc.ServerCredentials | None = None) -> Iterator[Collector]:
    """A collector on a port of its own; with credentials it wants TLS."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    host = "127.0.0.1:0"
    port = server.add_insecure_port(host) if credentials is None else server.add_secure_port(host, credentials)
    collector.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        collector.released.set()
        server.stop(None).wait()


def seen_in(request: Any) -> list[Seen]:
    """The spans of an ExportTraceServiceRequest."""
    spans = []
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            assert scope_spans.scope.name == "specwire"
            for span in scope_spans.spans:
                spans.append(
                    Seen(
                        span.name, resource["service.name"].removeprefix(SERVICE_PREFIX), resource["service.instance.id"], span.trace_id.hex(),
                        span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano,
                        _attributes(span.attributes), [(event.name, _attributes(event.attributes)) for event in span.events],
                        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links], span.status.code, span.status.message,
                    )
                )  # fmt: skip
    return spans


def check_declared(spans: list[Seen]) -> None:
    """Every span is as specwire.tracing.spec says, and has a status; ids are unique."""
    assert len({span.span_id for span in spans}) == len(spans), "two spans have one id"
    for span in spans:
        spec = BY_NAME[span.name]
        assert span.service == spec.service, span
        assert set(spec.attributes) <= set(span.attributes) <= {*spec.attributes, *spec.optional}, span
        assert {name: set(attributes) for name, attributes in span.events}.items() <= {
            name: set(attributes) for name, attributes in (spec.events or {}).items()
        }.items(), span  # fmt: skip
        assert not span.links or spec.links, span
        assert span.code in (Status.STATUS_CODE_OK, Status.STATUS_CODE_ERROR), span
        assert span.is_ok or ": " in span.message, span
        assert span.start_ns <= span.end_ns, span


def check_tree(spans: list[Seen], *, clock_ns: int = 2_000_000, is_whole: bool = True) -> dict[str, Seen]:
    """One trace with one root, whose spans have parents of the declared names around them; returns it by span id.

    Args:
        clock_ns: how far clocks of processes on one machine may be apart.
        is_whole: no span was lost.
    """
    by_id = {span.span_id: span for span in spans}
    roots = [span for span in spans if span.name == "generate"]
    assert len(roots) == 1, [span.name for span in spans]
    for span in spans:
        assert span.trace_id == roots[0].trace_id
        if span is roots[0]:
            continue
        parent = by_id.get(span.parent_id)
        if parent is None:
            assert not is_whole, f"{span.name} has the parent {span.parent_id}, which is in no trace"
            continue
        assert parent.name in BY_NAME[span.name].parents, (span.name, parent.name)
        # What a service still runs of a request that has ended may end later.
        assert span.start_ns >= parent.start_ns - clock_ns, (span, parent)
        assert span.end_ns <= parent.end_ns + clock_ns or not parent.is_ok, (span, parent)
    return by_id


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
