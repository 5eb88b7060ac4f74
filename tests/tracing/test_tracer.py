"""The way out of the process: never waited for, bounded, and what is lost is counted and said."""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence

import grpc
import pytest

from specwire.errors import InternalError
from specwire.messages import RoundTiming, VerifyRound
from specwire.tracing import Span, Tracer, open_tracer, record_round
from tests.tracing.collector import collecting
from tests.tracing.examples import SPANS, span

TIMEOUT_S = 60.0
BOUNDED_S = 30.0
"""Well above what closing may take, well below what a hung call would."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go to the collector without the 5 s that they may wait for others."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


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
