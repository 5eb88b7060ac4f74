"""The drafter's gRPC service: streams in, rounds to the worker, answers out."""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable

import grpc

from specwire.config import DrafterConfig
from specwire.errors import InvalidArgumentError, SpecwireError, UnavailableError
from specwire.futures import unwatched
from specwire.messages import DraftResult, DraftRound, Hello, ServiceDescription, Welcome
from specwire.rpc import Server
from specwire.tls import server_tls
from specwire.tracing import open_tracer
from specwire.v1 import drafter_pb2 as pb
from specwire.v1 import drafter_pb2_grpc as pb_grpc
from specwire.version import build_version
from specwire.wire import draft

from .method import Method, build_method
from .session import Session
from .worker import Worker

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
MAX_OUTSTANDING_ROUNDS = 8
"""Messages of one stream that may wait for the worker; then its reading pauses."""


class DrafterServer:
    """One drafter: binds, loads its method on the worker's thread, serves.

    Args:
        config: the service's configuration.
        build: makes the drafting method.
        cost_budget_s: time for the measurement of draft costs at the start; 0 = none.
    """

    def __init__(self, config: DrafterConfig, build: Callable[[DrafterConfig], Method] = build_method, *, cost_budget_s: float = 3.0) -> None:
        instance_id = uuid.uuid4().hex
        self._tracer = open_tracer("drafter", instance_id, endpoint=config.trace_endpoint, file=config.trace_file)
        self.worker = Worker(
            lambda: build(config),
            max_num_seqs=config.max_num_seqs,
            chunk=config.prefill_chunk,
            cost_budget_s=cost_budget_s,
            profile_context_len=config.profile_context_len,
            tracer=self._tracer,
        )
        max_message_bytes = config.max_message_mb << 20
        self._servicer = _Servicer(self.worker, max_message_bytes, instance_id)
        self._server = Server(config.listen, [SERVICE_NAME], self._servicer.register, max_message_bytes, tls=server_tls(config))
        self.worker.metrics.watch(self._server.certificates)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, with the ports that were chosen."""
        return self._server.bound_addresses

    async def start(self) -> None:
        """Binds and begins to load; NOT_SERVING until `wait_ready` returned. Raises UnavailableError if an address can't be bound."""
        await self._server.start()
        self.worker.start()

    async def wait_ready(self) -> None:
        """Returns when drafts can be asked for; raises what kept the method from being made."""
        await asyncio.wrap_future(self.worker.ready)
        self.worker.metrics.ready()
        await self._server.set_serving(True)

    async def wait_broken(self) -> None:
        """Never returns. Raises InternalError once batches keep failing: only a new process can help."""
        await asyncio.shield(unwatched(asyncio.wrap_future(self.worker.broken)))

    async def drain(self, grace_s: float) -> None:
        """NOT_SERVING; returns when all coordinators have gone on elsewhere, at the latest after grace_s."""
        await self._server.set_serving(False)
        self._servicer.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._servicer.is_idle.wait()
        except TimeoutError:
            logger.warning("a coordinator has not left within %g s of grace", grace_s)

    async def stop(self, grace_s: float = 2.0) -> bool:
        """NOT_SERVING, then streams end with UNAVAILABLE; False if the worker's thread is still busy after grace_s."""
        self._servicer.end_streams()
        await self._server.stop(grace_s)
        has_ended = await asyncio.to_thread(self.worker.stop, grace_s)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        return has_ended


class _Servicer(pb_grpc.DrafterServiceServicer):
    """Unpack, hand to the worker, pack."""

    def __init__(self, worker: Worker, max_message_bytes: int, instance_id: str) -> None:
        self._worker = worker
        self._max_message_bytes = max_message_bytes
        self._instance_id = instance_id
        self._streams: set[_Stream] = set()
        self._is_draining = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    def register(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DrafterServiceServicer_to_server(self, server)

    def drain(self) -> None:
        """Takes no more streams and tells those that there are to go on elsewhere; what they still send is answered."""
        self._is_draining = True
        for stream in self._streams:
            stream.announce_end()

    def end_streams(self) -> None:
        """Ends every stream: the drafter shuts down."""
        for stream in self._streams:
            stream.put(UnavailableError("the drafter is shutting down; decode without it or use another one"))

    async def Describe(self, request: pb.DrafterServiceDescribeRequest, context: grpc.aio.ServicerContext) -> pb.DrafterServiceDescribeResponse:
        return draft.pack_description(self._describe())

    async def Draft(self, requests: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext) -> AsyncIterator[pb.DraftResponse]:
        method_description = self._describe()
        first = await anext(aiter(requests), None)
        if first is None:
            return
        received_ns = time.time_ns()
        opening = draft.unpack_round(first)
        hello = opening.hello
        if hello is None:
            raise InvalidArgumentError("the first message of a Draft stream has no hello; send it with the coordinator's id and incarnation")
        yield draft.pack_result(DraftResult(opening.session, opening.lane, 0, welcome=self._welcome(hello)))
        stream = _Stream(self._worker, opening, f"draft stream of {hello.coordinator_id or 'an unnamed coordinator'}, lane {opening.lane}")
        logger.info("%s began (%s)", stream.label, method_description.method)
        self._streams.add(stream)
        self._worker.metrics.stream_opened(len(self._streams))
        self.is_idle.clear()
        if self._is_draining:  # since the first message was waited for
            stream.announce_end()
        # The generator may be left suspended at a yield when the client goes away.
        context.add_done_callback(lambda _: self._end(stream))  # type: ignore[arg-type]  # the stub asks for a class
        reader = asyncio.create_task(stream.read(opening, received_ns, requests))
        try:
            async for result in stream.results():
                yield draft.pack_result(dataclasses.replace(result, timing=dataclasses.replace(result.timing, sent_ns=time.time_ns())))
        finally:
            reader.cancel()
            self._end(stream)

    def _end(self, stream: "_Stream") -> None:
        stream.close()
        self._streams.discard(stream)
        self._worker.metrics.num_streams = len(self._streams)
        if not self._streams:
            self.is_idle.set()

    def _welcome(self, hello: Hello) -> Welcome:
        num_rounds = min(hello.max_outstanding_rounds or MAX_OUTSTANDING_ROUNDS, MAX_OUTSTANDING_ROUNDS)
        return Welcome(self._instance_id, num_rounds, self._worker.ready.result(timeout=0).num_free_blocks)

    def _describe(self) -> ServiceDescription:
        if self._is_draining:
            raise UnavailableError("the drafter is about to stop; decode without it or use another one")
        ready = self._worker.ready
        if not ready.done() or ready.exception() is not None:
            raise UnavailableError("the drafter is still loading; try again when its health is SERVING")
        return dataclasses.replace(
            ready.result().description,
            instance_id=self._instance_id,
            build=build_version(),
            draft_cost=self._worker.profile.costs,
            draft_ms_per_kv_token=self._worker.profile.ms_per_kv_token,
            draft_chunk_ms=self._worker.profile.chunk_ms,
            max_message_bytes=self._max_message_bytes,
        )


class _Stream:
    """One Draft stream between the event loop and the worker's thread."""

    def __init__(self, worker: Worker, opening: DraftRound, label: str) -> None:
        self.label = label
        self._opening = opening
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[DraftResult | Exception | None] = asyncio.Queue()
        self._may_read = asyncio.Semaphore(MAX_OUTSTANDING_ROUNDS)
        self._session: Session = worker.open_session(label, self._deliver)
        self._closed = False

    def put(self, item: DraftResult | Exception | None) -> None:
        """An answer, the error that ends the stream, or None: the client ended it. On the event loop."""
        self._outbox.put_nowait(item)

    def announce_end(self) -> None:
        """Tells the client to go on elsewhere."""
        self.put(DraftResult(self._opening.session, self._opening.lane, 0, draining=True))

    def close(self) -> None:
        """Frees the session's sequences; may be called again."""
        if not self._closed:
            self._closed = True
            self._worker.close_session(self._session)

    async def read(self, opening: DraftRound, received_ns: int, requests: AsyncIterator[pb.DraftRequest]) -> None:
        """Hands messages to the worker until the client ends the stream; then waits for their answers."""
        try:
            await self._submit(opening, received_ns)
            async for request in requests:
                received_ns = time.time_ns()
                await self._submit(draft.unpack_round(request), received_ns)
            for _ in range(MAX_OUTSTANDING_ROUNDS):
                await self._may_read.acquire()
            self.put(None)
        except Exception as error:
            self.put(error)

    async def results(self) -> AsyncIterator[DraftResult]:
        """Answers in order; ends with the stream, or raises the error that ended it."""
        while (item := await self._outbox.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def _submit(self, message: DraftRound, received_ns: int) -> None:
        await self._may_read.acquire()
        self._worker.submit(self._session, message, received_ns)

    def _deliver(self, item: DraftResult | SpecwireError | None) -> None:
        """On the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._delivered, item)
        except RuntimeError:
            logger.info("%s: its event loop ended before an answer", self.label)

    def _delivered(self, item: DraftResult | SpecwireError | None) -> None:
        self._may_read.release()
        if item is not None:
            self.put(item)
