"""Verifiers and drafters over gRPC."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from specwire.channel import ChannelSource
from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError, InternalError, SpecwireError, UnavailableError
from specwire.messages import ServiceDescription, TokenizerSpec
from specwire.rpc import open_channel
from specwire.statuses import NO_SUCH_METHOD, error_from_rpc
from specwire.tls import TlsOptions, client_tls, explain_handshake
from specwire.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specwire.wire import draft, verify

from .peers import DrafterFactory, DraftStream, VerifierFactory, VerifyStream

logger = logging.getLogger(__name__)

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class GrpcStream(Generic[Sent, Received]):
    """A bidirectional call whose writes are queued, so that a peer which stops reading holds nobody up."""

    def __init__(self, call: Any, pack: Callable[[Sent], Any], unpack: Callable[[Any], Received]) -> None:
        self._call = call
        self._pack = pack
        self._unpack = unpack
        self._outbox: deque[Sent] = deque()
        self._has_mail = asyncio.Event()
        self._error: SpecwireError | None = None
        self._writer = asyncio.create_task(self._write())

    def send(self, message: Sent) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    async def receive(self) -> Received:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._error or error_from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._error is None or (task is not None and task.cancelling()):
                raise
            raise self._error from None
        if response is grpc.aio.EOF:
            raise UnavailableError("the peer ended the stream")
        return self._unpack(response)

    def close(self) -> None:
        self._writer.cancel()
        self._call.cancel()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                while self._outbox:
                    await self._call.write(self._pack(self._outbox.popleft()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over: `receive` raises why
        except Exception as error:
            logger.exception("a message could not be written")
            self._error = InternalError(f"a message could not be written ({type(error).__name__}: {error})")
            self._call.cancel()


class _GrpcPeer:
    """The channel to a peer, which `_kind` names. With TLS it is another one for the next connection once the files have changed.

    Args:
        address: `host:port` or `unix:path`.
        max_message_bytes: largest message either way.
        server_name: the host name that it was found by, if any.
        tls: None = without.
        on_failed_reload: is told of changed files of its TLS that can't be used.
    """

    _kind = ""

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        server_name: str = "",
        tls: TlsOptions | None = None,
        on_failed_reload: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._source = ChannelSource(
            lambda: open_channel(address, max_message_bytes, server_name, is_peer=True, tls=tls), tls, on_failed_reload
        )  # fmt: skip
        self._channel = self._source.open()
        # A peer that is not there yet is waited for, and the caller bounds it. With TLS the reason may also be a certificate, which only a
        # call that does not wait can name.
        self._waits = tls is None or address.startswith("unix:")

    async def close(self) -> None:
        await self._channel.close()

    async def _renew(self) -> None:
        """Before a connection is made."""
        channel = self._source.renew()
        if channel is not None:
            old, self._channel = self._channel, channel
            await old.close()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, wait_for_ready=self._waits)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED and error.details() == NO_SUCH_METHOD:
                raise FailedPreconditionError(f"there is no {self._kind} at {self._address}, but another service; check the address") from error
            failure = error_from_rpc(error)
            if remedy := explain_handshake(str(failure)):
                raise UnavailableError(f"{failure}; {remedy}") from error
            raise failure from error


class GrpcVerifier(_GrpcPeer):
    """The verifier at an address."""

    _kind = "verifier"

    async def describe(self) -> ServiceDescription:
        """Begins a connection."""
        await self._renew()
        request = verifier_pb2.VerifierServiceDescribeRequest()
        return verify.unpack_description(await self._call(self._stub.Describe, request))

    async def get_tokenizer(self) -> TokenizerSpec:
        return verify.unpack_tokenizer(await self._call(self._stub.GetTokenizer, verifier_pb2.VerifierServiceGetTokenizerRequest()))

    def open_stream(self) -> VerifyStream:
        return GrpcStream(self._stub.Verify(), verify.pack_round, verify.unpack_result)

    @property
    def _stub(self) -> verifier_pb2_grpc.VerifierServiceStub:
        return verifier_pb2_grpc.VerifierServiceStub(self._channel)


class GrpcDrafter(_GrpcPeer):
    """The drafter at an address."""

    _kind = "drafter"

    async def describe(self) -> ServiceDescription:
        """Begins a connection."""
        await self._renew()
        return draft.unpack_description(await self._call(self._stub.Describe, drafter_pb2.DrafterServiceDescribeRequest()))

    def open_stream(self) -> DraftStream:
        return GrpcStream(self._stub.Draft(), draft.pack_round, draft.unpack_result)

    @property
    def _stub(self) -> drafter_pb2_grpc.DrafterServiceStub:
        return drafter_pb2_grpc.DrafterServiceStub(self._channel)


class Connectors:
    """What makes the peers of a coordinator, with TLS where it is configured.

    Attributes:
        verifier, drafter: make one.
        num_failed_reloads: changed TLS files that could not be used, once for each peer that was to be connected with them.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        tls = client_tls(config)
        self.verifier: VerifierFactory = partial(GrpcVerifier, tls=tls, on_failed_reload=self._count)
        self.drafter: DrafterFactory = partial(GrpcDrafter, tls=tls, on_failed_reload=self._count)
        self.num_failed_reloads = 0

    def _count(self) -> None:
        self.num_failed_reloads += 1
