"""The services under fuzz, each in this process: what is good to send, and what must be so after every call."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from hypothesis import strategies as st

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.rpc import open_channel
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import draft, generate, verify
from tests.drafter.helpers import serve_drafter
from tests.fuzz.caller import TYPED, Caller, Outcome
from tests.fuzz.good import SAMPLINGS, draft_conversation, request, verify_conversation
from tests.fuzz.strategies import Conversation, conversations
from tests.scripted.cluster import Cluster
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.verifier.harness import describe, make_verifier, serve, tiny_model
from tests.waiting import until
from verifier_svc.session import SessionGate

_GOOD_EVERY = 5
_SETTLE_S = 30.0
_FAULTS = {grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNKNOWN.value[0]}


class Target(ABC):
    """One method of a service that runs.

    Attributes:
        good: conversations that the service takes, to be changed.
        most: messages of a conversation.
    """

    good: Sequence[Sequence[Message]]
    most = 8

    def __init__(self) -> None:
        self._num_calls = 0
        self._first: object = None
        self._num_tasks = 0

    @property
    def strategy(self) -> st.SearchStrategy[Conversation]:
        """What `check` takes."""
        return conversations(self.good, self.most)

    @abstractmethod
    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[None]:
        """Runs the service; `self.caller` can be used inside."""
        yield

    caller: Caller

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing of any call is left."""

    def check_integrity(self) -> None:  # noqa: B027 - nothing to check is fine
        """Raises AssertionError where the service's books disagree."""

    def check_responses(self, responses: Sequence[bytes]) -> None:  # noqa: B027 - most responses carry no statuses
        """Raises AssertionError for an answer that no service should give."""

    async def check(self, conversation: Conversation) -> None:
        """Sends it. Whatever it is, the call ends in a typed status, nothing of it stays, and a good call is answered as before."""
        if self._first is None:
            self._first = await self._call_good()
            self._num_tasks = len(asyncio.all_tasks())
        with tracebacks() as found:
            outcome = await self.caller.call(conversation)
        assert not found, "\n".join(found)
        assert outcome.code in TYPED, f"{outcome.code.name}: {outcome.details}"
        self.check_responses(outcome.responses)
        await self._settle()
        self._num_calls += 1
        if self._num_calls % _GOOD_EVERY == 0:
            assert await self._call_good() == self._first, "a good call is answered otherwise than before"

    @abstractmethod
    def summarize(self, responses: Sequence[bytes]) -> object:
        """What must be equal whenever the same is sent."""

    async def _call_good(self) -> object:
        outcome: Outcome = await self.caller.call(Conversation(tuple(part.SerializeToString() for part in self.good[0]), leaves=False))
        assert outcome.code is grpc.StatusCode.OK, outcome.details
        await self._settle()
        return self.summarize(outcome.responses)

    async def _settle(self) -> None:
        await until(self.is_idle, _SETTLE_S)
        self.check_integrity()
        if self._num_tasks:
            await until(lambda: len(asyncio.all_tasks()) <= self._num_tasks, _SETTLE_S)


@contextlib.contextmanager
def tracebacks() -> Iterator[list[str]]:
    """What is logged with a traceback: a fault, whatever the client is told."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    collector = Collector(logging.ERROR)
    logging.getLogger().addHandler(collector)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(collector)


class VerifyTarget(Target):
    """The real verifier with a tiny model."""

    def __init__(self) -> None:
        super().__init__()
        self._verifier = make_verifier(
            tiny_model(), num_blocks=24, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_num_draft_tokens=4
        )
        self.good = [verify_conversation(sampling) for sampling in SAMPLINGS]

    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[None]:
        async with serve(self._verifier, folder) as served:
            gate = served.server._gate
            assert gate is not None
            self._gate: SessionGate = gate
            self.caller = Caller(served.channel, "/specwire.v1.VerifierService/Verify", streams=True, waits=True)
            yield

    def is_idle(self) -> bool:
        verifier = self._verifier
        assert not self._gate.broken.done(), "rounds keep failing"
        return self._gate._holder is None and not verifier.num_open_slots and verifier.num_free_blocks == verifier.num_blocks

    def check_integrity(self) -> None:
        self._verifier.check_integrity()

    def summarize(self, responses: Sequence[bytes]) -> object:
        # What earlier calls left in the prefix cache is no difference in the answers.
        results = [verify.unpack_result(verify.pb.VerifyResponse.FromString(response)) for response in responses]
        return [[(row.status, row.token_ids) for row in result.rows] for result in results]


class DraftTarget(Target):
    """The real drafter with ngram."""

    def __init__(self) -> None:
        super().__init__()
        self.good = [draft_conversation()]

    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[None]:
        async with serve_drafter(folder, DrafterConfig(max_num_seqs=4)) as server, open_channel(server.addresses[0]) as channel:
            self._server = server
            self.caller = Caller(channel, "/specwire.v1.DrafterService/Draft", streams=True)
            yield

    def is_idle(self) -> bool:
        worker = self._server.worker
        return not self._server._servicer._streams and worker.pool.num_free == 4 and not worker._sessions

    def summarize(self, responses: Sequence[bytes]) -> object:
        results = [draft.unpack_result(draft.pb.DraftResponse.FromString(response)) for response in responses]
        return [(result.round, result.rows) for result in results]


class CoordinatorTarget(Target):
    """The coordinator, over scripted peers in this process, or over the real services with a tiny model.

    Args:
        method: Generate, Session or GenerateBatch.
        is_real: real peers.
    """

    def __init__(self, method: str, *, is_real: bool = False) -> None:
        super().__init__()
        self._method = method
        self._is_real = is_real
        requests = [request(sampling) for sampling in SAMPLINGS]
        if method == "Generate":
            self.good = [[request] for request in requests]
            self.most = 1
        elif method == "GenerateBatch":
            self.good = [[pb.GenerateBatchRequest(requests=requests[:1])], [pb.GenerateBatchRequest(requests=requests)]]
            self.most = 1
        else:
            starts = [pb.SessionStart(stream_id=number, request=request) for number, request in enumerate(requests, start=1)]
            self.good = [
                [pb.SessionRequest(starts=starts[:1])],
                [pb.SessionRequest(starts=starts), pb.SessionRequest(cancels=[1, 2])],
                [*(pb.SessionRequest(starts=[start]) for start in starts)],
            ]

    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[None]:
        async with self._engine(folder) as engine:
            self._engine_under_test = engine
            server = CoordinatorServer(engine, CoordinatorConfig(listen=(f"unix:{folder}/coordinator",), max_batch_requests=8))
            await server.start()
            self._server = server
            async with open_channel(server.bound_addresses[0]) as channel:
                self.caller = Caller(channel, f"/specwire.v1.CoordinatorService/{self._method}", streams=self._method == "Session")
                yield
            await server.stop(0)

    @contextlib.asynccontextmanager
    async def _engine(self, folder: Path) -> AsyncIterator[Engine]:
        if not self._is_real:
            # The queue takes two requests with the most choices.
            script = byte_verifier_script(max_model_len=48, max_num_seqs=64)
            async with Cluster([script], [byte_drafter_script()], k=3, max_queue=256) as cluster:
                await cluster.ready()
                yield cluster.engine
            return
        verifier = make_verifier(tiny_model(), num_blocks=64, max_model_len=48, max_num_seqs=16, max_num_batched_tokens=128, max_num_draft_tokens=4)
        async with serve(verifier, folder) as served, serve_drafter(folder) as drafter:
            assert describe(verifier).vocab_size == 61
            engine = Engine(
                CoordinatorConfig(
                    verifiers=(served.address,),
                    drafters=(drafter.addresses[0],),
                    max_queue=64,
                    speculative_config=SpeculativeConfig(num_speculative_tokens=3),
                )
            )
            await engine.start()
            while not engine.ready.is_ready:
                await engine.readiness_changed()
            yield engine
            await engine.stop(0)

    def is_idle(self) -> bool:
        engine = self._engine_under_test
        lanes = engine.lanes
        return not engine._requests and not self._server._servicer._sessions and not any(lane.running or lane.in_flight for lane in lanes)

    def check_integrity(self) -> None:
        self._engine_under_test.check_integrity()
        assert self._engine_under_test.ready.is_ready, self._engine_under_test.ready.reason

    def check_responses(self, responses: Sequence[bytes]) -> None:
        for message in map(self._parse, responses):
            for part in message.events if self._method == "Session" else [message]:
                choices = [part.choice] if self._method == "Session" else part.choices
                for error in [choice.error for choice in choices] + ([] if self._method == "Generate" else [part.error]):
                    assert error.code not in _FAULTS, error.message

    def summarize(self, responses: Sequence[bytes]) -> object:
        # How the tokens are spread over messages, and how they came about, is a matter of timing.
        tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for message in map(self._parse, responses):
            if self._method == "Session":
                update = generate.unpack_update(message)
                for delta in update.deltas:
                    tokens[delta.stream_id, delta.choice_index] += delta.token_ids
                choices = [(event.stream_id, event.choice) for event in update.events if event.choice is not None]
            else:
                number = message.index if self._method == "GenerateBatch" else 0
                choices = [(number, generate.unpack_choice(choice)) for choice in message.choices]
            for number, choice in choices:
                tokens[number, choice.index] += choice.token_ids
        return dict(tokens)

    def _parse(self, response: bytes) -> Any:
        return {"Generate": pb.GenerateResponse, "Session": pb.SessionResponse, "GenerateBatch": pb.GenerateBatchResponse}[self._method].FromString(
            response
        )
