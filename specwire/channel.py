"""What is special about some channels: metadata on every call, and certificates that change."""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.tls import FileWatch, TlsOptions

logger = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]


def bearer(api_key: str) -> Metadata:
    """The metadata that an API key travels in; none for an empty one. Raises InvalidArgumentError for what no header can carry."""
    if not api_key:
        return ()
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise InvalidArgumentError("the API key has spaces, line ends or characters that are not ASCII; give it exactly as it was made")
    return (("authorization", f"Bearer {api_key}"),)


class ChannelSource:
    """Opens channels, each with what is in the files of its TLS by then.

    Args:
        open_one: opens a channel; raises InvalidArgumentError if a file can't be used.
        tls: whose files they are; None = without TLS.
        on_failed_reload: is told of changed files that can't be used.
    """

    def __init__(self, open_one: Callable[[], grpc.aio.Channel], tls: TlsOptions | None, on_failed_reload: Callable[[], None] = lambda: None) -> None:
        self.open = open_one
        self._on_failed_reload = on_failed_reload
        self._watch = FileWatch(() if tls is None else tls.files)

    def renew(self) -> grpc.aio.Channel | None:
        """A channel in place of the last one if the files have changed since; for whoever is about to connect anew. None: there is nothing
        new, or, with a line in the log, nothing that can be used."""
        if not self._watch.has_changed():
            return None
        try:
            return self.open()
        except SpecwireError as error:
            self._on_failed_reload()
            logger.error("the changed TLS files are not used, the ones before stay: %s", error)
            return None


class MarkedChannel(grpc.aio.Channel):
    """A channel with metadata on every call. Interceptors could add it too, but put tasks and queues of their own into every stream."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._mark(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._mark(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._mark(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._mark(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> "MarkedChannel":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _mark(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = (), **kwargs: Any) -> Any:
            return method(*args, metadata=(*self._metadata, *(metadata or ())), **kwargs)

        return call
