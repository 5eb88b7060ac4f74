"""Spans to a collector over OTLP/gRPC, set up by OpenTelemetry's variables (https://opentelemetry.io/docs/specs/otel/protocol/exporter/)."""

import logging
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.util.re import parse_env_headers

from specwire.errors import InvalidArgumentError
from specwire.tls import TlsOptions, channel_credentials
from specwire.tracing.otlp import make_request
from specwire.tracing.span import AttributeValue, Span
from specwire.tracing.tracer import politely

logger = logging.getLogger(__name__)

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_TIMEOUT_S = 5.0
_SCHEDULE_DELAY_S = 5.0
_FIRST_PAUSE_S = 1.0
# A collector that is back is found within this time, not only after gRPC's own two minutes.
_OPTIONS = (("grpc.max_reconnect_backoff_ms", 5000),)
_PASSING = {
    grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED, grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
}  # fmt: skip
"""What OTLP asks clients to try again after (https://opentelemetry.io/docs/specs/otlp/#failures)."""


class OtlpExporter:
    """Sends spans to a collector. OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT (milliseconds), _COMPRESSION, _CERTIFICATE, _CLIENT_CERTIFICATE and
    _CLIENT_KEY apply, and before them those with TRACES_ in their names.

    Args:
        endpoint: host:port or a URL; only https means TLS.
        resource: attributes of the process.
        scope, version: of the instrumentation.

    Raises:
        InvalidArgumentError: a variable, or a file that one names, can't be used.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, AttributeValue], scope: str, version: str) -> None:
        self._resource, self._scope, self._version = resource, scope, version
        self._timeout_s = _read_s(_name("TIMEOUT"), _TIMEOUT_S)
        self._metadata = tuple(parse_env_headers(_variable("HEADERS"), liberal=True).items())
        self._channel = _open_channel(endpoint)
        # The bytes of a request as they are, the collector's answer as a message.
        self._call: grpc.UnaryUnaryMultiCallable[bytes, ExportTraceServiceResponse] = self._channel.unary_unary(
            _EXPORT, None, ExportTraceServiceResponse.FromString
        )
        self._shut = threading.Event()

    def export(self, spans: Sequence[Span]) -> bool:
        try:
            return self._send(make_request(politely(spans), self._resource, self._scope, self._version))
        except Exception:
            if not self._shut.is_set():  # a channel that is closed at the same time raises
                logger.exception("%d spans could not be sent", len(spans))
            return False

    def shut(self) -> None:
        self._shut.set()
        self._channel.close()

    def _send(self, request: bytes) -> bool:
        """Tries until the time is over. Whether the collector took everything; the tracer tells people what got lost."""
        end_s, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                response = self._call(request, timeout=end_s - time.monotonic(), metadata=self._metadata)
            except grpc.RpcError as error:
                wait_s = pause_s * random.uniform(0.8, 1.2)
                logger.debug("the collector did not take spans: %s", error)
                if error.code() not in _PASSING or time.monotonic() + wait_s >= end_s or self._shut.wait(wait_s):
                    return False
                pause_s *= 2
            else:
                refused = response.partial_success
                if refused.rejected_spans:
                    logger.debug("the collector refused %d spans: %s", refused.rejected_spans, refused.error_message)
                return not refused.rejected_spans


def schedule_delay_s() -> float:
    """How long spans wait for others: OTEL_BSP_SCHEDULE_DELAY. A call to a collector costs as much as a hundred spans.

    Raises:
        InvalidArgumentError: the variable is no number of milliseconds.
    """
    return _read_s("OTEL_BSP_SCHEDULE_DELAY", _SCHEDULE_DELAY_S)


def _open_channel(endpoint: str) -> grpc.Channel:
    scheme, _, host = endpoint.rpartition("://")
    target = host.partition("/")[0]
    compression = _read_compression()
    if scheme != "https":
        return grpc.insecure_channel(target, options=_OPTIONS, compression=compression)
    tls = TlsOptions(_variable("CERTIFICATE"), _variable("CLIENT_CERTIFICATE"), _variable("CLIENT_KEY"))
    return grpc.secure_channel(target, channel_credentials(tls), options=_OPTIONS, compression=compression)


def _name(name: str) -> str:
    """The variable for traces if it is set, else the one for everything."""
    for_traces = f"OTEL_EXPORTER_OTLP_TRACES_{name}"
    return for_traces if os.environ.get(for_traces) else f"OTEL_EXPORTER_OTLP_{name}"


def _variable(name: str) -> str:
    return os.environ.get(_name(name), "")


def _read_s(name: str, default_s: float) -> float:
    """Seconds from a variable in milliseconds."""
    text = os.environ.get(name, "")
    if not text:
        return default_s
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise InvalidArgumentError(f"{name} is {text!r}, but must be a number of milliseconds of at least 1")
    return int(text) / 1000


def _read_compression() -> grpc.Compression:
    text = _variable("COMPRESSION").lower()
    if text not in ("", "none", "gzip"):
        raise InvalidArgumentError(f"OTEL_EXPORTER_OTLP_COMPRESSION is {text!r}, but must be gzip or none")
    return grpc.Compression.Gzip if text == "gzip" else grpc.Compression.NoCompression
