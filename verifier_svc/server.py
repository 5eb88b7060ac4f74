"""The verifier's gRPC service: unpack, call the domain, pack."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from specwire.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError, UnsupportedError
from specwire.messages import VerifyResult, VerifyRound
from specwire.rpc import DEFAULT_MAX_MESSAGE_BYTES, Server
from specwire.rpc_options import HOLDER_KEEPALIVE_MS
from specwire.tls import ServerTls
from specwire.tracing import Tracer
from specwire.v1 import verifier_pb2 as pb
from specwire.v1 import verifier_pb2_grpc
from specwire.wire import features, verify

from .metrics import VerifierMetrics
from .session import SessionGate, VerifySession
from .worker import RoundWorker

if TYPE_CHECKING:  # loading brings torch, which takes seconds; the addresses are bound and answer before that
    from .feature_streams import FeatureStreams
    from .loading import LoadedVerifier

logger = logging.getLogger(__name__)

SERVICE_NAME = "specwire.v1.VerifierService"
_ANSWER_HEADER_BYTES = 4096
"""Of a message with features, beside them."""
_LAST_WAIT_S = 1.0
"""What the worker threads get at the end to finish what they do."""


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers UNAVAILABLE until `serve` hands it a loaded verifier."""

    def __init__(self, metrics: VerifierMetrics) -> None:
        self._metrics = metrics
        self._features: FeatureStreams | None = None
        self._gate: SessionGate | None = None
        self._description: pb.VerifierServiceDescribeResponse | None = None
        self._tokenizer: pb.VerifierServiceGetTokenizerResponse | None = None

    def serve(self, loaded: "LoadedVerifier", gate: SessionGate) -> None:
        """Starts to answer."""
        self._description = verify.pack_description(loaded.description)
        if loaded.tokenizer is not None:
            self._tokenizer = verify.pack_tokenizer(loaded.tokenizer)
            size, limit = self._tokenizer.ByteSize(), loaded.description.max_message_bytes
            if size > limit:
                raise ResourceExhaustedError(f"the tokenizer takes {size} bytes, but a message may have {limit}; raise max_message_mb")
        books = loaded.verifier.features
        if books is not None:
            from .feature_streams import FeatureStreams  # brings torch, which is there by now

            self._features = FeatureStreams(books, loaded.description.max_message_bytes - _ANSWER_HEADER_BYTES, self._metrics)
        self._gate = gate

    def end_pulls(self) -> None:
        """Drafters may keep their streams for ever: they end now."""
        if self._features is not None:
            self._features.end()

    async def Describe(self, request: pb.VerifierServiceDescribeRequest, context: grpc.aio.ServicerContext) -> pb.VerifierServiceDescribeResponse:
        self._ready_gate()
        assert self._description is not None
        return self._description

    async def GetTokenizer(
        self, request: pb.VerifierServiceGetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> pb.VerifierServiceGetTokenizerResponse:
        self._ready_gate()
        if self._tokenizer is None:
            raise UnsupportedError(
                "this verifier serves no tokenizer: it was started with --skip-tokenizer, or its model's folder has no tokenizer.json; send token ids"
            )
        return self._tokenizer

    async def Verify(self, request_iterator: AsyncIterator[pb.VerifyRequest], context: grpc.aio.ServicerContext) -> AsyncIterator[pb.VerifyResponse]:
        gate = self._ready_gate()
        first = await anext(request_iterator, None)
        opening = None if first is None else verify.unpack_round(first)
        if opening is None or opening.hello is None:
            raise InvalidArgumentError("the first message of a Verify stream must have hello; send coordinator_id and incarnation in it")
        session, welcome = gate.enter(opening.hello)
        context.add_done_callback(lambda _: gate.leave(session))  # type: ignore[arg-type]  # the stub is a class, not a protocol
        reader = asyncio.create_task(_read(opening, request_iterator, session))
        try:
            yield verify.pack_result(VerifyResult(opening.session, opening.lane, round=0, free_blocks=welcome.free_blocks, welcome=welcome))
            async for result in session.results():
                if result.draining:
                    result = replace(result, session=opening.session, lane=opening.lane)
                yield verify.pack_result(replace(result, timing=replace(result.timing, sent_ns=time.time_ns())))
        finally:
            reader.cancel()
            gate.leave(session)

    async def PullFeatures(
        self, request_iterator: AsyncIterator[pb.PullFeaturesRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PullFeaturesResponse]:
        self._ready_gate()
        if self._features is None:
            raise UnsupportedError("this verifier keeps no features; start it with --features and the folder of the draft head")
        pulls = (features.unpack_pull(request) async for request in request_iterator)
        async for pulled in self._features.answers(pulls):
            yield features.pack_pulled(pulled)

    def _ready_gate(self) -> SessionGate:
        if self._gate is None:
            raise UnavailableError("the model is still loading; wait until the health service answers SERVING")
        return self._gate


async def _read(opening: VerifyRound, requests: AsyncIterator[pb.VerifyRequest], session: VerifySession) -> None:
    """Submits rounds until the client closes its side. A bad message ends the stream once the rounds before it are answered."""
    try:
        if opening.round or opening.closes or opening.opens or opening.rows:
            session.submit(opening)
        async for request in requests:
            message = verify.unpack_round(request)
            if message.hello is not None:
                raise InvalidArgumentError("only the first message of a Verify stream may have hello; open a new stream instead")
            session.submit(message)
        session.close()
    except Exception as error:
        session.close(error)


class VerifierServer:
    """A verifier on its addresses: health is NOT_SERVING until `load` has finished.

    Args:
        addresses: where to listen.
        load: makes the verifier; runs in the thread that will launch its rounds.
        instance_id: of this process.
        max_outstanding_rounds: W.
        max_message_bytes: bound of one message either way.
        tracer: takes the spans of rounds; closed by `stop`.
        tls: what it shows on its TCP addresses; None = no TLS.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        load: Callable[[], "LoadedVerifier"],
        instance_id: str,
        max_outstanding_rounds: int = 2,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        tracer: Tracer | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self._load = load
        self._tracer = tracer
        self._instance_id = instance_id
        self._max_outstanding_rounds = max_outstanding_rounds
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifier")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifier-reader")
        self.metrics = VerifierMetrics(tracer)
        self._servicer = VerifierServicer(self.metrics)
        self._gate: SessionGate | None = None
        self._server = Server(
            addresses,
            [SERVICE_NAME],
            lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self._servicer, server),
            max_message_bytes,
            HOLDER_KEEPALIVE_MS,
            tls,
        )
        self.metrics.watch(self._server.certificates)

    @property
    def bound_addresses(self) -> tuple[str, ...]:
        return self._server.bound_addresses

    async def start(self) -> None:
        """Binds the addresses; raises UnavailableError where one is taken, InvalidArgumentError if a file of TLS can't be used."""
        await self._server.start()

    async def load(self) -> None:
        """Loads the verifier, then serves. Raises what loading raises."""
        loaded = await asyncio.get_running_loop().run_in_executor(self._launcher, self._load)
        worker = RoundWorker(loaded.verifier, self._launcher, self._reader, self.metrics, self._tracer)
        self._gate = SessionGate(worker, self._instance_id, self._max_outstanding_rounds, self.metrics)
        self.metrics.loaded(loaded.verifier)
        self._servicer.serve(loaded, self._gate)
        await self._server.set_serving(True)

    async def wait_broken(self) -> None:
        """Never returns. Raises InternalError once rounds keep failing: only a new process can help; of a loaded verifier."""
        assert self._gate is not None, "only a loaded verifier can break"
        await asyncio.shield(self._gate.broken)

    async def drain(self, grace_s: float) -> None:
        """NOT_SERVING; returns when the coordinator has gone on elsewhere, at the latest after grace_s."""
        await self._server.set_serving(False)
        if self._gate is None:
            return
        self._gate.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._gate.is_free.wait()
        except TimeoutError:
            logger.warning("the coordinator has not left within %g s of grace", grace_s)

    async def stop(self, grace_s: float = 5.0) -> bool:
        """NOT_SERVING, outstanding rounds are answered, streams end; False if the worker threads are still busy then."""
        await self._server.set_serving(False)
        if self._gate is not None:
            self._gate.shut()
        self._servicer.end_pulls()
        await self._server.stop(grace_s)
        if self._gate is not None:
            self._gate.evict()
        ended = asyncio.create_task(asyncio.to_thread(self._end_threads))
        await asyncio.wait((ended,), timeout=_LAST_WAIT_S)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        return ended.done()

    def _end_threads(self) -> None:
        self._launcher.shutdown()  # what it launches last is read by the other one
        self._reader.shutdown()
