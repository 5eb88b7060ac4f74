"""A process's way out for spans: a bounded queue, and a thread that calls the exporters. Whoever records never waits."""

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from specwire.tracing.span import Span
from specwire.version import build_version

logger = logging.getLogger(__name__)

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SCOPE = "specwire"
_GATHER_S = 1.0
_MAX_BATCH = 512
_MAX_QUEUED = 16_384
_MANY_QUEUED = 4096
"""So many records are not held back for others."""
_WARNING_PERIOD_S = 5.0
_CLOSE_S = 1.0
_NUM_AT_ONCE = 16
_PAUSE_S = 50e-6
"""The thread pauses after so many spans, so that the event loop gets the interpreter."""
_LAST_WORDS_S = 0.2
"""What an export that was cut off may take to return."""

Make = Callable[[], Sequence[Span]]


class Exporter(Protocol):
    """Takes spans out of the process, on the tracer's thread."""

    def export(self, spans: Sequence[Span]) -> bool:
        """Whether the spans are out; may take long, and raises nothing."""

    def shut(self) -> None:
        """Makes an export that is under way return soon; called once, on another thread."""


class Tracer:
    """Counts what is recorded, and what gets lost on the way.

    Args:
        exporters: each gets every span.
        max_queued: most records that wait; what comes on top is dropped.
        gather_s: how long a record waits for others: an export costs more than most of what is in it.

    Attributes:
        num_recorded: spans handed over.
        num_dropped: those of them that found the queue full, or the tracer closed.
        num_failed: those that could not be built, or that an exporter could not send.
        num_bad_traceparents: those of rounds that name no span.
    """

    def __init__(self, exporters: Sequence[Exporter], *, max_queued: int = _MAX_QUEUED, gather_s: float = _GATHER_S) -> None:
        self.num_recorded = self.num_dropped = self.num_failed = self.num_bad_traceparents = 0
        self._exporters = tuple(exporters)
        self._max_queued = max_queued
        self._gather_s = gather_s
        self._random = random.Random()
        self._queue: deque[tuple[int, Make]] = deque()
        self._num_done = 0  # spans taken from the queue whose export has ended, well or not
        self._has_mail = threading.Event()
        self._hurries = threading.Event()
        self._closing = threading.Event()
        self._gives_up = False
        self._num_reported = 0
        self._reported_s = time.monotonic() - _WARNING_PERIOD_S
        self._thread = threading.Thread(target=self._run, name="tracer", daemon=True)
        self._thread.start()

    def new_trace_id(self) -> int:
        return self._random.getrandbits(128) or 1

    def new_span_id(self) -> int:
        return self._random.getrandbits(64) or 1

    def record(self, num_spans: int, make: Make) -> None:
        """Queues spans. Never waits and never raises; to be called from one thread.

        Args:
            make: builds them later, on the tracer's thread, from data that nobody changes any more.
        """
        self.num_recorded += num_spans
        if len(self._queue) >= self._max_queued or self._closing.is_set():
            self.num_dropped += num_spans
            return
        self._queue.append((num_spans, make))
        if not self._has_mail.is_set():
            self._has_mail.set()
        elif len(self._queue) == _MANY_QUEUED:
            self._hurries.set()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Exports what waits, for timeout_s at most; logs how many spans were lost since the start. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._has_mail.set()
        self._hurries.set()
        self._thread.join(timeout_s)
        self._gives_up = True
        for exporter in self._exporters:
            exporter.shut()
        self._thread.join(_LAST_WORDS_S)
        num_left = self.num_recorded - self.num_dropped - self._num_done
        num_lost = self.num_dropped + self.num_failed + num_left
        if num_lost:
            logger.warning(
                "%d of %d spans were lost: %d found the queue full, %d could not be exported, %d were left when the service stopped",
                num_lost, self.num_recorded, self.num_dropped, self.num_failed, num_left,
            )  # fmt: skip

    def _run(self) -> None:
        while not self._gives_up:
            self._has_mail.wait()
            self._hurries.wait(self._gather_s)
            self._has_mail.clear()
            if not self._closing.is_set():
                self._hurries.clear()
            while self._queue and not self._gives_up:
                self._export()
            if self._closing.is_set():
                return

    def _export(self) -> None:
        """One batch."""
        spans: list[Span] = []
        num_spans = num_records = 0
        while self._queue and num_spans < _MAX_BATCH:
            count, make = self._queue.popleft()
            num_records += 1
            if num_records % _NUM_AT_ONCE == 0:
                time.sleep(_PAUSE_S)
            num_spans += count
            try:
                spans += make()
            except Exception:
                logger.exception("%d spans could not be built", count)
                self.num_failed += count
        if spans:
            outcomes = [exporter.export(spans) for exporter in self._exporters]
            self.num_failed += 0 if all(outcomes) else len(spans)
        self._num_done += num_spans
        if not self._gives_up:
            self._report()

    def _report(self) -> None:
        """One warning a period for spans that got lost."""
        num_lost, now_s = self.num_dropped + self.num_failed, time.monotonic()
        if num_lost > self._num_reported and now_s - self._reported_s >= _WARNING_PERIOD_S:
            self._num_reported, self._reported_s = num_lost, now_s
            logger.warning(
                "%d spans are lost so far: %d found the queue full, %d could not be exported; is the collector there, and fast enough?",
                num_lost, self.num_dropped, self.num_failed,
            )  # fmt: skip


def politely(spans: Iterable[Span]) -> Iterator[Span]:
    """Hands spans out with pauses in between: without them a thread keeps the interpreter for 5 ms, and the event loop waits as long."""
    for index, span in enumerate(spans, start=1):
        if index % _NUM_AT_ONCE == 0:
            time.sleep(_PAUSE_S)
        yield span


def open_tracer(service: str, instance_id: str, *, endpoint: str, file: str) -> Tracer | None:
    """A service's tracer, or None where nothing takes its spans.

    Args:
        service: coordinator, verifier or drafter.
        instance_id: tells processes of one service apart.
        endpoint: OTLP collector (gRPC), host:port or a URL with http or https; "" = what OTEL_EXPORTER_OTLP_ENDPOINT says, if it is set.
        file: OTLP JSON lines are appended here; "" = nowhere.

    Raises:
        InvalidArgumentError: the file can't be written, or a variable of OpenTelemetry's can't be used.
    """
    endpoint = endpoint or next((value for name in _ENDPOINT_VARIABLES if (value := os.environ.get(name))), "")
    if not endpoint and not file:
        return None
    from specwire.tracing.resource import make_resource  # loads OpenTelemetry's SDK

    origin = make_resource(service, instance_id), _SCOPE, build_version()
    exporters: list[Exporter] = []
    gather_s = _GATHER_S
    if file:
        from specwire.tracing.export import FileExporter

        exporters.append(FileExporter(file, *origin))
    if endpoint:
        from specwire.tracing.collector import OtlpExporter, schedule_delay_s

        gather_s = schedule_delay_s()
        exporters.append(OtlpExporter(endpoint, *origin))
    logger.info("spans go to %s", " and ".join(filter(None, (file, endpoint))))
    return Tracer(exporters, gather_s=gather_s)
