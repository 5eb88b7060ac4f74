"""The HTTP endpoint for Prometheus; the only module that knows its client library."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isinf
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from specwire.errors import UnavailableError
from specwire.metrics.declare import Kind, Metric, Sample
from specwire.metrics.histogram import Histogram

logger = logging.getLogger(__name__)

_SILENCE_S = 10.0
"""How long who connects may say nothing, or not read: each connection has a thread."""
CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of what `render` gives."""
_FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}


class Collector:
    """Reads a service's numbers whenever somebody asks (prometheus_client's Collector).

    Args:
        metrics: all families, in the order in which they are shown.
        collect: the series as they are now; called on the endpoint's threads.
    """

    def __init__(self, metrics: Sequence[Metric], collect: Callable[[], Iterable[Sample]]) -> None:
        self._metrics = tuple(metrics)
        self._collect = collect

    def describe(self) -> Iterator[Family]:
        """Every family without series: the registry asks this instead of reading the numbers."""
        return iter(self._families().values())

    def collect(self) -> Iterator[Family]:
        families = self._families()
        for metric, labels, value in self._collect():
            family = families[metric.name]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Histogram), f"{metric.name} is a histogram, not {value!r}"
                family.add_metric(labels, [("+Inf" if isinf(bound) else str(bound), count) for bound, count in value.buckets()], value.sum)
            else:
                assert not isinstance(value, Histogram), f"{metric.name} is a {metric.kind}, no histogram"
                family.add_metric(labels, value)
        return iter(families.values())

    def _families(self) -> dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        return {metric.name: _FAMILIES[metric.kind](metric.name, metric.text, labels=metric.labels) for metric in self._metrics}


def render(collector: Collector) -> bytes:
    """What an endpoint answers, for servers that have one of their own: the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


class MetricsEndpoint:
    """Serves a collector at http://HOST:PORT/metrics on threads of its own, from a registry that nothing else shares."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.address = f"{host}:{server.server_port}"

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join()


def start_endpoint(listen: str, collector: Collector) -> MetricsEndpoint:
    """Serves on `host:port` (port 0: any free one; the log names it).

    Raises:
        UnavailableError: the address can't be bound.
    """
    host, _, port = listen.rpartition(":")
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise UnavailableError(f"cannot serve metrics on {listen} ({error}); stop what uses it, or choose another metrics_listen") from error
    server.RequestHandlerClass = _with_timeout(server.RequestHandlerClass)
    endpoint = MetricsEndpoint(server, thread, host)
    logger.info("metrics on http://%s/metrics", endpoint.address)
    return endpoint


def _with_timeout(handler: Any) -> Any:
    """A request handler that hangs up on who says nothing."""

    class Handler(handler):
        timeout = _SILENCE_S

        def handle(self) -> None:
            with contextlib.suppress(TimeoutError):
                super().handle()

    return Handler
