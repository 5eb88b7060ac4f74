"""What OpenTelemetry's variables make of the way to a collector, and what its answers mean."""

import os
import time
from pathlib import Path

import grpc
import pytest

from specwire.errors import InvalidArgumentError
from specwire.tls import ServerTls, read_ca, read_pair
from specwire.tracing import Span, open_tracer
from specwire.tracing.collector import OtlpExporter, schedule_delay_s
from tests.security.certificates import Authority
from tests.tracing.collector import Collector, collecting

PREFIX = "OTEL_EXPORTER_OTLP_"
SPANS = [Span("step", 1, number, 3, False, 1_000, 2_000, {"specwire.choice": 0}) for number in range(1, 4)]


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def export(collector: Collector, endpoint: str = "") -> bool:
    exporter = OtlpExporter(endpoint or collector.address, {"service.name": "specwire-verifier", "service.instance.id": "v"}, "specwire", "1")
    try:
        return exporter.export(SPANS)
    finally:
        exporter.shut()


@pytest.mark.parametrize("endpoint", ["{}", "http://{}", "http://{}/"])
def test_addresses(endpoint: str) -> None:
    with collecting() as collector:
        assert export(collector, endpoint.format(collector.address))
        assert [(span.service, int(span.span_id, 16)) for span in collector.spans] == [("verifier", 1), ("verifier", 2), ("verifier", 3)]


def test_headers_and_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}HEADERS", "X-Tenant=a%20b, authorization=Basic abc=")
    monkeypatch.setenv(f"{PREFIX}COMPRESSION", "gzip")
    with collecting() as collector:
        assert export(collector)
        assert {name: collector.metadata[name] for name in ("x-tenant", "authorization")} == {"x-tenant": "a b", "authorization": "Basic abc="}
        assert len(collector.spans) == len(SPANS)
        monkeypatch.setenv(f"{PREFIX}TRACES_HEADERS", "x-tenant=c")
        assert export(collector)
        assert (collector.metadata["x-tenant"], collector.metadata.get("authorization")) == ("c", None)


def test_tls_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("collector")
    tls = ServerTls(pair.cert, pair.key, authority.file)
    credentials = grpc.ssl_server_credentials([read_pair(tls.cert, tls.key)], read_ca(tls.client_ca), require_client_auth=True)
    monkeypatch.setenv(f"{PREFIX}TIMEOUT", "500")
    with collecting(credentials) as collector:
        monkeypatch.setenv(f"{PREFIX}CERTIFICATE", authority.file)
        assert not export(collector, f"https://{collector.address}"), "it has no certificate of its own"
        monkeypatch.setenv(f"{PREFIX}TIMEOUT", "20000")
        monkeypatch.setenv(f"{PREFIX}CLIENT_CERTIFICATE", pair.cert)
        monkeypatch.setenv(f"{PREFIX}CLIENT_KEY", pair.key)
        assert export(collector, f"https://{collector.address}")
        assert len(collector.spans) == len(SPANS)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TIMEOUT", "5s", "OTEL_EXPORTER_OTLP_TIMEOUT is '5s', but must be a number of milliseconds"),
        ("COMPRESSION", "zstd", "OTEL_EXPORTER_OTLP_COMPRESSION is 'zstd', but must be gzip or none"),
        ("CERTIFICATE", "/nowhere/ca.pem", "the CA file /nowhere/ca.pem can't be read"),
        ("CLIENT_KEY", "/nowhere/key.pem", "key"),
    ],
)
def test_variables_that_can_not_be_used(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(InvalidArgumentError, match=message):
        OtlpExporter("https://127.0.0.1:1", {}, "specwire", "1")


def test_how_long_spans_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedule_delay_s() == 5.0
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "250")
    assert schedule_delay_s() == 0.25
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "soon")
    with pytest.raises(InvalidArgumentError, match="OTEL_BSP_SCHEDULE_DELAY is 'soon', but must be a number of milliseconds"):
        open_tracer("coordinator", "1", endpoint="127.0.0.1:1", file="")


def test_an_error_that_passes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.tracing.collector._FIRST_PAUSE_S", 0.001)
    with collecting() as collector:
        collector.codes = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED]
        assert export(collector)
        assert (collector.num_calls, len(collector.spans)) == (3, len(SPANS))
        collector.codes = [grpc.StatusCode.PERMISSION_DENIED]
        assert not export(collector)
        assert collector.num_calls == 4


def test_tries_end_with_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}TIMEOUT", "300")
    with collecting() as collector:
        collector.released.clear()
        started_s = time.monotonic()
        assert not export(collector)
        assert 0.25 < time.monotonic() - started_s < 4.5


def test_spans_that_the_collector_refuses_are_lost() -> None:
    with collecting() as collector:
        collector.num_rejected = 1
        assert not export(collector)
        assert collector.num_calls == 1
