"""gRPC set-up that every service and client shares: channels, servers, health and reflection."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specwire import errors
from specwire.addresses import check_free, is_local
from specwire.channel import MarkedChannel, Metadata
from specwire.messages import ServiceDescription
from specwire.rpc_options import KEEPALIVE_MS, PEER_KEEPALIVE_MS, channel_options, connection_limit, server_options
from specwire.statuses import ErrorInterceptor, error_from_rpc, hide_disconnects
from specwire.tls import ServerCertificates, ServerTls, TlsOptions, channel_credentials
from specwire.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specwire.wire import draft, verify

logger = logging.getLogger(__name__)

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
_DESCRIBE_TIMEOUT_S = 10.0


def open_channel(
    address: str,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    server_name: str = "",
    *,
    is_peer: bool = False,
    reads_ahead: bool = True,
    tls: TlsOptions | None = None,
    metadata: Metadata = (),
) -> grpc.aio.Channel:
    """An asyncio channel to `host:port` or `unix:path`.

    Args:
        server_name: the host name that stands for the address, if it was looked up already; what a certificate must name, then.
        is_peer: a verifier or drafter, whose loss must be noticed soon.
        reads_ahead: what is on its way to a slow reader may grow to megabytes, as large answers over long distances need it; otherwise it
            stays at 64 KiB a stream, so that a sender that gathers what its reader has no time for learns soon that it has none.
        tls: None = without; Unix sockets never have it, since the rights of the file decide who may use them. The files are read now: a
            channel does not notice that they change (specwire.channel.ChannelSource).
        metadata: of every call.

    Raises:
        InvalidArgumentError: a file of tls can't be used.
    """
    options, credentials = _channel_arguments(address, max_message_bytes, server_name, tls, is_peer=is_peer)
    if not reads_ahead:
        options.append(("grpc.http2.bdp_probe", 0))
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return MarkedChannel(channel, metadata) if metadata else channel


def open_sync_channel(address: str, max_message_bytes: int, server_name: str = "", *, tls: TlsOptions | None = None) -> grpc.Channel:
    """A channel to a peer for a thread without an event loop; arguments and errors as `open_channel`'s."""
    options, credentials = _channel_arguments(address, max_message_bytes, server_name, tls, is_peer=True)
    return grpc.insecure_channel(address, options) if credentials is None else grpc.secure_channel(address, credentials, options)


def _channel_arguments(
    address: str, max_message_bytes: int, server_name: str, tls: TlsOptions | None, *, is_peer: bool
) -> tuple[list[tuple[str, int | str]], grpc.ChannelCredentials | None]:
    """Options and, with TLS, credentials."""
    options: list[tuple[str, int | str]] = [*channel_options(max_message_bytes, PEER_KEEPALIVE_MS if is_peer else KEEPALIVE_MS)]
    if server_name:
        options.append(("grpc.default_authority", server_name))
    if tls is None or address.startswith("unix:"):
        return options, None
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options, channel_credentials(tls)


class Server:
    """A gRPC server with health and reflection; `ready` decides what the health service answers.

    Args:
        addresses: where to listen, `host:port` (port 0 = any free one) or `unix:path`.
        service_names: full names of the registered services.
        register: adds the servicers to the server.
        max_message_bytes: bound of one message either way.
        keepalive_ms: how long a client may be silent until it is pinged, and then until its connection is given up.
        tls: what it shows and asks of clients on its TCP addresses; None = no TLS. Unix sockets never have it.
        has_keys: whether calls need an API key.

    Attributes:
        certificates: None without TLS.

    Raises:
        UnavailableError: from `start`, when an address can't be bound; it names the address.
        InvalidArgumentError: from `start`, when a file of tls can't be used.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        service_names: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        keepalive_ms: tuple[int, int] = KEEPALIVE_MS,
        tls: ServerTls | None = None,
        *,
        has_keys: bool = False,
    ) -> None:
        hide_disconnects()
        self._is_closed = has_keys or bool(tls and tls.client_ca)
        self.certificates = None if tls is None else ServerCertificates(tls)
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=server_options(max_message_bytes, keepalive_ms, connection_limit(len(addresses))),
        )
        self._addresses = tuple(addresses)
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.bound_addresses: tuple[str, ...] = ()

    async def start(self) -> None:
        """Bind and serve, NOT_SERVING until `set_serving(True)`."""
        credentials = None if self.certificates is None else self.certificates.credentials()
        bound = []
        for address in self._addresses:
            try:
                check_free(address)
                if credentials is None or address.startswith("unix:"):
                    port = self._server.add_insecure_port(address)
                else:
                    port = self._server.add_secure_port(address, credentials)
            except (OSError, RuntimeError) as error:
                raise errors.UnavailableError(f"cannot listen on {address} ({error}); stop what uses it, or choose another address") from error
            bound.append(address if address.startswith("unix:") else f"{address.rsplit(':', 1)[0]}:{port}")
        self.bound_addresses = tuple(bound)
        await self.set_serving(False)
        await self._server.start()
        self._warn_if_exposed()

    def _warn_if_exposed(self) -> None:
        exposed = " ".join(address for address in self.bound_addresses if not is_local(address))
        if not exposed or (self._is_closed and self.certificates):
            return
        if self._is_closed:
            logger.warning("API keys travel in the clear to %s: set tls_cert and tls_key", exposed)
        elif self.certificates:
            logger.warning("whoever reaches %s can call it: set tls_client_auth, or api_keys of a coordinator", exposed)
        else:
            logger.warning(
                "whoever reaches %s can call it and read along: set tls_cert and tls_key, and tls_client_auth or api_keys of a coordinator", exposed
            )

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING first, then streams get grace_s to finish."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def is_serving(channel: grpc.aio.Channel, timeout_s: float = 1.0) -> bool:
    """Whether the peer's overall health is SERVING; False when it can't be reached."""
    try:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


async def wait_serving(channel: grpc.aio.Channel) -> None:
    """Returns once the peer's overall health is SERVING; a peer that can't be reached yet is waited for."""
    async with contextlib.aclosing(watch_serving(channel)) as changes:
        async for serves in changes:
            if serves:
                return


async def watch_serving(channel: grpc.aio.Channel) -> AsyncGenerator[bool, None]:
    """Whether the peer's overall health is SERVING: now, or as soon as the peer can be reached, and at every change; False when it goes away.
    Never ends."""
    while True:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        was_there = False
        try:
            async for reply in call:
                was_there = True
                yield reply.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            logger.debug("health watch ended: %s", error.code().name)
        finally:
            call.cancel()
        if was_there:
            yield False
        await asyncio.sleep(0.1)  # the peer went away while it was watched


async def describe_verifier(channel: grpc.aio.Channel) -> ServiceDescription:
    """What the verifier at the other end is and can hold. Raises a SpecwireError if it does not say."""
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    return verify.unpack_description(await _describe(stub.Describe, verifier_pb2.VerifierServiceDescribeRequest()))


async def describe_drafter(channel: grpc.aio.Channel) -> ServiceDescription:
    """What the drafter at the other end is and can hold. Raises a SpecwireError if it does not say."""
    stub = drafter_pb2_grpc.DrafterServiceStub(channel)
    return draft.unpack_description(await _describe(stub.Describe, drafter_pb2.DrafterServiceDescribeRequest()))


async def _describe(method: Any, request: Any) -> Any:
    try:
        return await method(request, wait_for_ready=True, timeout=_DESCRIBE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


async def wait_for_stop_signal() -> None:
    """Returns at the first SIGTERM or SIGINT."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
