"""The metrics endpoint of a service process, if it is configured to have one."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from specwire.metrics.declare import Metric, Sample

if TYPE_CHECKING:
    from specwire.metrics.endpoint import MetricsEndpoint


class MetricsServer:
    """Serves a service's metrics from `start` to `stop`; does nothing where no address is configured.

    Args:
        listen: metrics_listen of the service's configuration: `host:port`, or empty.
        metrics: all that are declared.
        collect: their values now; called on another thread.
    """

    def __init__(self, listen: str, metrics: Sequence[Metric], collect: Callable[[], Iterable[Sample]]) -> None:
        self._listen = listen
        self._metrics = metrics
        self._collect = collect
        self._endpoint: MetricsEndpoint | None = None

    @property
    def address(self) -> str:
        """Where it serves, with the port that was chosen; empty where it does not."""
        return "" if self._endpoint is None else self._endpoint.address

    def start(self) -> None:
        """Binds and serves. Raises UnavailableError if the address can't be bound."""
        if self._listen:
            from specwire.metrics.endpoint import Collector, start_endpoint  # brings an HTTP server

            self._endpoint = start_endpoint(self._listen, Collector(self._metrics, self._collect))

    async def stop(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.stop()
