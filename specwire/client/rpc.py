"""The coordinator's calls as a client needs them; the only module of the client that knows protobuf."""

import asyncio
from typing import Any

import grpc

from specwire.errors import FailedPreconditionError, SpecwireError, UnavailableError, UnreachableError, UnsupportedError
from specwire.messages import CanaryAction, CoordinatorStatus, SessionStart, SessionUpdate, TokenizerSpec, VariantStatus
from specwire.statuses import NO_SUCH_METHOD, error_from_rpc, is_answer
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1 import coordinator_pb2_grpc
from specwire.wire import generate
from specwire.wire.status import pack_canary, unpack_canary_answer, unpack_status

PackedStart = pb.SessionStart


def pack_start(start: SessionStart) -> tuple[PackedStart, int]:
    """The start as it is sent, and its bytes."""
    message = generate.pack_start(start)
    return message, message.ByteSize()


async def fetch_tokenizer(channel: grpc.aio.Channel) -> TokenizerSpec | None:
    """The served tokenizer; None if there is none. Raises the call's error as a SpecwireError, UnreachableError where no coordinator answered."""
    try:
        response = await coordinator_pb2_grpc.CoordinatorServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest())
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and error.details() == NO_SUCH_METHOD:
            raise UnreachableError("another server answers there, no coordinator") from None
        failure = _failure(error)
        if isinstance(failure, (UnsupportedError, FailedPreconditionError)):
            return None
        raise failure from None
    return generate.unpack_tokenizer(response)


async def fetch_status(channel: grpc.aio.Channel, timeout_s: float) -> CoordinatorStatus:
    """The coordinator's state. Raises the call's error as a SpecwireError, UnreachableError where no coordinator answered."""
    try:
        response = await coordinator_pb2_grpc.CoordinatorServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise UnreachableError("what answers there is no coordinator, or an older one that does not know GetStatus") from None
        raise _failure(error) from None
    return unpack_status(response)


async def send_canary(channel: grpc.aio.Channel, action: CanaryAction, share: float, config: str, timeout_s: float) -> tuple[VariantStatus, ...]:
    """Changes the canary. Raises the call's error as a SpecwireError, UnreachableError where no coordinator answered."""
    request = pack_canary(action, share, config)
    try:
        response = await coordinator_pb2_grpc.CoordinatorServiceStub(channel).SetCanary(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and error.details() == NO_SUCH_METHOD:
            raise UnreachableError("what answers there is no coordinator, or an older one that knows no canary") from None
        raise _failure(error) from None
    return unpack_canary_answer(response)


def _failure(error: grpc.aio.AioRpcError) -> SpecwireError:
    failure = error_from_rpc(error)
    return UnreachableError(str(failure)) if isinstance(failure, UnavailableError) and not is_answer(error) else failure


class SessionCall:
    """One Session stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Session()

    async def write(self, starts: list[PackedStart], cancels: list[int]) -> None:
        """Sends one message; returns once the transport has taken it. Does nothing if the stream is over: `read` says why."""
        try:
            await self._call.write(generate.pack_command(starts, cancels))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def read(self) -> SessionUpdate:
        """The next message. Raises the SpecwireError with which the stream ended."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        if response is grpc.aio.EOF:
            raise UnavailableError("the coordinator ended the stream")
        return generate.unpack_update(response)

    def cancel(self) -> None:
        self._call.cancel()
