"""Verifiers and drafters over gRPC."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from specwire.errors import InternalError, SpecwireError, UnavailableError
from specwire.messages import ServiceDescription, TokenizerSpec
from specwire.rpc import error_from_rpc, open_channel
from specwire.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specwire.wire import draft, verify

from .peers import DraftStream, VerifyStream

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
            if self._error is None:
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


class GrpcVerifier:
    """The verifier at an address."""

    def __init__(self, address: str, max_message_bytes: int) -> None:
        self._channel = open_channel(address, max_message_bytes)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)

    async def describe(self) -> ServiceDescription:
        return verify.unpack_description(await _unary(self._stub.Describe, verifier_pb2.VerifierServiceDescribeRequest()))

    async def get_tokenizer(self) -> TokenizerSpec:
        return verify.unpack_tokenizer(await _unary(self._stub.GetTokenizer, verifier_pb2.VerifierServiceGetTokenizerRequest()))

    def open_stream(self) -> VerifyStream:
        return GrpcStream(self._stub.Verify(), verify.pack_round, verify.unpack_result)

    async def close(self) -> None:
        await self._channel.close()


class GrpcDrafter:
    """The drafter at an address."""

    def __init__(self, address: str, max_message_bytes: int) -> None:
        self._channel = open_channel(address, max_message_bytes)
        self._stub = drafter_pb2_grpc.DrafterServiceStub(self._channel)

    async def describe(self) -> ServiceDescription:
        return draft.unpack_description(await _unary(self._stub.Describe, drafter_pb2.DrafterServiceDescribeRequest()))

    def open_stream(self) -> DraftStream:
        return GrpcStream(self._stub.Draft(), draft.pack_round, draft.unpack_result)

    async def close(self) -> None:
        await self._channel.close()


async def _unary(method: Any, request: Any) -> Any:
    """Waits for the connection as long as it takes; the caller bounds it."""
    try:
        return await method(request, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
