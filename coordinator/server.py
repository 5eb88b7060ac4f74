"""The coordinator's gRPC service: unpack, hand to the engine, pack what comes back."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

import grpc

from specwire.config import CoordinatorConfig
from specwire.errors import DeadlineExceededError, InvalidArgumentError, SpecwireError, UnavailableError, UnsupportedError
from specwire.messages import ErrorStatus, GenerateRequest, TokenizerSpec
from specwire.rpc import Server
from specwire.tls import server_tls
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1 import coordinator_pb2_grpc
from specwire.wire import generate
from specwire.wire.status import pack_canary_answer, pack_status, unpack_canary

from .api_keys import KeyRing, Tenant
from .engine import Engine
from .status import describe_status
from .stream import SHUTTING_DOWN, BatchResult, BatchStream, RequestStream, SessionStream, Submitter

logger = logging.getLogger(__name__)

SERVICE_NAME = "specwire.v1.CoordinatorService"
_ANOTHER_MODEL = "the coordinator serves another model now; connect again, and encode text with the tokenizer that it serves then"
Update = TypeVar("Update", covariant=True)
Response = TypeVar("Response")


class _Stream(Protocol[Update]):
    """What the three kinds of streams have in common (coordinator.stream)."""

    def updates(self) -> AsyncIterator[Update]: ...

    def close(self) -> None: ...


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Clients' requests as the engine's.

    Args:
        engine: generates.
        config: of the service; message size and queue length bound what a stream may hold.
        keys: API keys, one of which every call needs; None = none is needed.
    """

    def __init__(self, engine: Engine, config: CoordinatorConfig, keys: KeyRing | None = None) -> None:
        self._engine = engine
        self._keys = keys
        self._max_batch_requests = config.max_batch_requests
        self._max_session_requests = config.max_session_requests
        self._max_message_bytes = config.max_message_mb << 20
        # Half of a message: `num_bytes` of what waits is an estimate. Half of the queue: a batch leaves room for other clients.
        self._max_update_bytes = self._max_message_bytes // 2
        self._max_in_flight = max(1, config.max_queue // 2)
        self._stall_s = config.client_stall_s
        self._sessions: set[SessionStream] = set()
        self._batches: set[BatchStream] = set()
        self._tokenizer: tuple[TokenizerSpec, pb.GetTokenizerResponse] | None = None
        engine.watch_model(lambda: self.drain(_ANOTHER_MODEL))

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        self._count("generate", context)
        engine = self._admit(context)
        try:
            stream = RequestStream(engine, _limit_time(generate.unpack_request(request), context.time_remaining()))
        except SpecwireError as error:
            self._engine.metrics.refused(error)
            raise
        async for response in self._respond("generate", stream, generate.pack_response, context):
            yield response

    async def Session(self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext) -> AsyncIterator[pb.SessionResponse]:
        self._count("session", context)
        session = SessionStream(self._admit(context), self._max_update_bytes, self._max_session_requests)
        self._sessions.add(session)
        reader = asyncio.create_task(_read(requests, session))
        context.add_done_callback(lambda _: reader.cancel())  # type: ignore[arg-type]  # grpc-stubs' type takes no function
        try:
            async for response in self._respond("session", session, generate.pack_update, context):
                yield response
        finally:
            self._sessions.discard(session)
            reader.cancel()

    async def GenerateBatch(self, request: pb.GenerateBatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateBatchResponse]:
        self._count("batch", context)
        engine = self._admit(context)
        if len(request.requests) > self._max_batch_requests:
            text = f"the batch has {len(request.requests)} requests, but may have {self._max_batch_requests}"
            error = InvalidArgumentError(f"{text}; send several, or raise max_batch_requests")
            self._engine.metrics.refused(error)
            raise error
        remaining_s = context.time_remaining()
        requests: list[GenerateRequest | SpecwireError] = []
        for message in generate.unpack_batch_request(request):
            try:
                requests.append(_limit_time(message, remaining_s))
            except SpecwireError as refusal:
                requests.append(refusal)
        batch = BatchStream(engine, requests, self._max_in_flight)
        self._batches.add(batch)
        context.add_done_callback(lambda _: self._batches.discard(batch))  # type: ignore[arg-type]  # grpc-stubs' type takes no function
        async for response in self._respond("batch", batch, self._pack_result, context):
            yield response

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> pb.GetTokenizerResponse:
        self._admit(context)
        spec = self._engine.tokenizer
        if spec is None and not self._engine.ready.is_ready:
            raise UnavailableError(f"the tokenizer is not known yet: {self._engine.ready.reason}; try again when health is SERVING")
        if spec is None:
            raise UnsupportedError("no tokenizer is served; send token ids instead of text and decode the ids yourself")
        if self._tokenizer is None or self._tokenizer[0] is not spec:
            # Compressing a large vocabulary takes a good part of a second.
            self._tokenizer = spec, await asyncio.to_thread(generate.pack_tokenizer, spec)
        return self._tokenizer[1]

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusResponse:
        self._admit(context)
        return pack_status(describe_status(self._engine))

    async def SetCanary(self, request: pb.SetCanaryRequest, context: grpc.aio.ServicerContext) -> pb.SetCanaryResponse:
        if self._keys is not None:
            self._keys.check_operator(context.invocation_metadata() or ())
        return pack_canary_answer(self._engine.set_canary(*unpack_canary(request)))

    def drain(self, reason: str) -> None:
        """Sessions and batches that are open begin no further requests and end with the last one they have."""
        for session in self._sessions:
            session.drain(reason)
        for batch in self._batches:
            batch.drain(reason)

    def _count(self, kind: str, context: grpc.aio.ServicerContext) -> None:
        """Counts a call that begins, and its end."""
        metrics = self._engine.metrics
        metrics.streams_opened[kind] += 1
        context.add_done_callback(lambda _: metrics.stream_closed(kind))  # type: ignore[arg-type]  # grpc-stubs' type takes no function

    def _admit(self, context: grpc.aio.ServicerContext) -> Submitter:
        """What a call may submit its requests to. Raises UnauthenticatedError for a call without a valid API key."""
        if self._keys is None:
            return self._engine
        return Tenant(self._engine, self._keys, self._keys.authenticate(context.invocation_metadata() or ()))

    async def _respond(
        self, kind: str, stream: _Stream[Update], pack: Callable[[Update], Response], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Response]:
        """A stream's updates as messages. A client that does not read keeps the call at its `yield`; after client_stall_s nothing runs for it
        any more, and when it reads again it gets an error: gRPC can't tell it before."""
        # The generator may be left suspended at its yield when the client goes away.
        context.add_done_callback(lambda _: stream.close())  # type: ignore[arg-type]  # grpc-stubs' type takes no function
        has_stalled = False

        def give_up() -> None:
            nonlocal has_stalled
            has_stalled = True
            self._engine.metrics.streams_stalled[kind] += 1
            logger.warning("what runs for the %s call of %s ends: its client has read nothing for %g s", kind, context.peer(), self._stall_s)
            stream.close()

        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        context.add_done_callback(lambda _: timer.cancel() if timer else None)  # type: ignore[arg-type]
        try:
            async for update in stream.updates():
                message = pack(update)
                timer = loop.call_later(self._stall_s, give_up)
                yield message
                timer.cancel()
                if has_stalled:
                    text = f"the client has read nothing for {self._stall_s:g} s, so that its requests were ended"
                    raise DeadlineExceededError(f"{text}; read what comes, or raise client_stall_s")
        finally:
            if timer is not None:
                timer.cancel()
            stream.close()

    def _pack_result(self, result: BatchResult) -> pb.GenerateBatchResponse:
        response = generate.pack_batch_response(result.index, result.choices, result.error)
        size = response.ByteSize()
        if size <= self._max_message_bytes:
            return response
        text = f"the result of request {result.index} takes {size} bytes, but a message may have {self._max_message_bytes}"
        error = ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], f"{text}; stream it instead, ask for fewer logprobs or raise max_message_mb")
        return generate.pack_batch_response(result.index, [], error)


class CoordinatorServer:
    """The coordinator on its addresses; NOT_SERVING until told otherwise.

    Args:
        engine: generates; already started, or soon.
        config: addresses and limits.

    Raises:
        InvalidArgumentError: the file of API keys can't be used.
    """

    def __init__(self, engine: Engine, config: CoordinatorConfig) -> None:
        self._engine = engine
        self.keys = KeyRing(config.api_keys) if config.api_keys else None
        self._servicer = CoordinatorServicer(engine, config, self.keys)
        self._server = Server(
            config.listen,
            [SERVICE_NAME],
            lambda server: coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self._servicer, server),
            config.max_message_mb << 20,
            tls=server_tls(config),
            has_keys=self.keys is not None,
        )
        engine.metrics.watch(self.keys, self._server.certificates)

    @property
    def bound_addresses(self) -> tuple[str, ...]:
        """Where it listens, with the ports that were chosen."""
        return self._server.bound_addresses

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            UnavailableError: an address can't be bound.
            InvalidArgumentError: a file of TLS can't be used.
        """
        await self._server.start()

    async def follow_readiness(self) -> None:
        """Keeps health SERVING while the engine is ready and NOT_SERVING otherwise; never returns."""
        has_served = False
        while True:
            ready = self._engine.ready
            has_served = has_served or ready.is_ready
            state = "serving" if ready.is_ready else "not serving" if has_served else "starting"
            logger.info("%s: %s", state, ready.reason or "all peers are there")
            await self._server.set_serving(ready.is_ready)
            if self._engine.ready == ready:
                await self._engine.readiness_changed()

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING; running requests get grace_s to end, idle sessions end at once."""
        self._servicer.drain(SHUTTING_DOWN)
        await self._server.stop(grace_s)


async def _read(requests: AsyncIterator[pb.SessionRequest], session: SessionStream) -> None:
    """Starts and cancels what the client asks for; a start that is wrong answers only its own stream id."""
    try:
        async for message in requests:
            starts, cancels = generate.unpack_command(message)
            for stream_id, request in starts:
                await session.wait_for_room()
                try:
                    session.start(stream_id, _limit_time(request, None))
                except SpecwireError as error:
                    session.refuse(stream_id, error)
            for stream_id in cancels:
                session.cancel(stream_id)
    except Exception as error:
        session.end_input(error)
    else:
        session.end_input()


def _limit_time(request: GenerateRequest | SpecwireError, remaining_s: float | None) -> GenerateRequest:
    """The request with a timeout that is not longer than what is left of its call's deadline. Raises the error of one that can't be read."""
    if isinstance(request, SpecwireError):
        raise request
    if request.timeout_ms is not None and request.timeout_ms <= 0:
        raise InvalidArgumentError(f"timeout_ms is {request.timeout_ms}, but must be at least 1; leave it out for no limit")
    if remaining_s is None:
        return request
    remaining_ms = max(1, round(remaining_s * 1000))
    return dataclasses.replace(request, timeout_ms=remaining_ms if request.timeout_ms is None else min(request.timeout_ms, remaining_ms))
