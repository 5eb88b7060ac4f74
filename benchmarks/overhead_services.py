"""The processes of benchmarks.overhead: scripted peers that keep a record, an echo in the coordinator's place, a coordinator that times its hops.

python -m benchmarks.overhead_services verifier|drafter|echo|timed-coordinator FOLDER NUM_SEQS K [round_ms=MS] [costs]

A round of the verifier takes round_ms besides its own work.
With costs, verifier and drafter say what they cost: 20 ms a round and little for each draft, so that adaptive verification asks for all and keeps
many. It looks at the clock, too: rounds must take about as long.
All addresses are in FOLDER; what a process has recorded is a pickle there, written when it is stopped.
"""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import asyncio
import dataclasses
import pickle
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from benchmarks.overhead_trace import EchoScript, Hop, Received
from coordinator.engine import Engine
from coordinator.rpc import GrpcDrafter, GrpcVerifier
from coordinator.server import SERVICE_NAME, CoordinatorServer
from specwire import rpc
from specwire.config import CoordinatorConfig
from specwire.messages import DraftCost, DraftResult, DraftRound, RoundTiming, VerifyCost, VerifyResult, VerifyRound
from specwire.process import run_service
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import coordinator_pb2, coordinator_pb2_grpc, drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.scripted.drafter import DrafterScript, DraftSession, ScriptedDrafter
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier, Session, VerifierScript

K = 5
ACCEPTANCE = 0.7
_MAX_MODEL_LEN = 8192
_VERIFY_COST = VerifyCost((1, 256, 512, 1024, 2048), (20.0, 21.0, 22.0, 24.0, 28.0))
_DRAFT_COST = tuple(DraftCost(k, num_seqs, 0.5) for k in (1, 16) for num_seqs in (1, 256))


def address_of(folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}"


def coordinator_config(folder: Path, num_seqs: int, k: int, *, is_adaptive: bool = False) -> CoordinatorConfig:
    """No step may go on without its drafts, however late they are on a busy machine: steps of all runs are the same."""
    return CoordinatorConfig(
        listen=(address_of(folder, "coordinator"),),
        verifiers=(address_of(folder, "verifier"),),
        drafters=(address_of(folder, "drafter"),),
        min_draft_wait_ms=10_000.0,
        max_queue=max(1, num_seqs),
        max_stream_backlog=1 << 20,
        speculative_config=SpeculativeConfig(num_speculative_tokens=k, enable_adaptive_verification=is_adaptive),
    )


class RecordingVerifier(ScriptedVerifier):
    """Also notes when rounds come and what the process under test has used until then, and gives its answers times."""

    def __init__(self, folder: Path, num_seqs: int, k: int, cost: VerifyCost, round_ms: float) -> None:
        super().__init__(
            VerifierScript(
                max_model_len=_MAX_MODEL_LEN, max_num_seqs=num_seqs, max_num_batched_tokens=max(256, 2 * num_seqs * (k + 1)),
                verify_cost=cost, max_num_draft_tokens=k, block_size=16, num_blocks=num_seqs * _MAX_MODEL_LEN // 16, prefix_caching=False,
                delay_s=round_ms / 1000,
            )
        )  # fmt: skip
        self.records: list[Received] = []
        self._subject = Subject(folder)

    def receive(self, session: Session, message: VerifyRound) -> None:
        self.records.append(Received(time.time_ns(), self._subject.cpu_ns(), message))
        super().receive(session, message)

    def launch(self, session: Session) -> VerifyResult:
        started_ns = time.time_ns()
        received_ns = next(record.received_ns for record in reversed(self.records) if record.message is session.queue[0])
        result = super().launch(session)
        finished_ns = time.time_ns()
        return dataclasses.replace(result, timing=RoundTiming(received_ns, started_ns, finished_ns, finished_ns))


class RecordingDrafter(ScriptedDrafter):
    """As RecordingVerifier."""

    def __init__(self, num_seqs: int, k: int, cost: tuple[DraftCost, ...]) -> None:
        super().__init__(
            DrafterScript(
                max_model_len=_MAX_MODEL_LEN, max_num_seqs=num_seqs, max_num_draft_tokens=k, acceptance=ACCEPTANCE, draft_cost=cost,
                score=lambda is_right, position: 0.9 - 0.1 * (position % 3) if is_right else 0.4 + 0.1 * (position % 4),
            )
        )  # fmt: skip
        self.records: list[Received] = []

    def answer(self, session: DraftSession, message: DraftRound) -> DraftResult | None:
        received_ns = time.time_ns()
        self.records.append(Received(received_ns, 0, message))
        result = super().answer(session, message)
        finished_ns = time.time_ns()
        return None if result is None else dataclasses.replace(result, timing=RoundTiming(received_ns, received_ns, finished_ns, finished_ns))


class Subject:
    """The CPU clock of the process under test, whose id is in FOLDER/subject."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "subject"
        self._clock: int | None = None

    def cpu_ns(self) -> int:
        """User and system time of all its threads (clock_getcpuclockid(3) of another process, as Linux numbers such clocks)."""
        if self._clock is None:
            self._clock = (~int(self._file.read_text()) << 3) | 2
        return time.clock_gettime_ns(self._clock)


class EchoServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Sends what a coordinator has sent in an earlier run, each message when the answers before it have come. Knows nothing of them."""

    def __init__(self, folder: Path) -> None:
        script: EchoScript = pickle.loads((folder / "echo").read_bytes())
        self._verify_hello = verifier_pb2.VerifyRequest.FromString(script.verify_hello)
        self._draft_hello = drafter_pb2.DraftRequest.FromString(script.draft_hello)
        self._steps = [
            (
                [
                    (drafter_pb2.DraftRequest.FromString(request), answered)
                    for request, answered in zip(step.draft_requests, step.is_answered, strict=True)
                ],
                verifier_pb2.VerifyRequest.FromString(step.verify_request),
                [coordinator_pb2.SessionResponse.FromString(response) for response in step.session_responses],
            )
            for step in script.steps
        ]
        self._draft = drafter_pb2_grpc.DrafterServiceStub(rpc.open_channel(address_of(folder, "drafter"))).Draft()
        self._verify = verifier_pb2_grpc.VerifierServiceStub(rpc.open_channel(address_of(folder, "verifier"))).Verify()

    async def connect(self) -> None:
        await self._draft.write(self._draft_hello)
        await self._draft.read()
        await self._verify.write(self._verify_hello)
        await self._verify.read()

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await anext(requests)
        for draft_requests, verify_request, responses in self._steps:
            for request, is_answered in draft_requests:
                await self._draft.write(request)
                if is_answered:
                    await self._draft.read()
            await self._verify.write(verify_request)
            await self._verify.read()
            for response in responses:
                yield response


class TimedStream:
    """A coordinator's stream whose round trips are noted."""

    def __init__(self, stream: Any, hops: list[Hop]) -> None:
        self._stream = stream
        self._hops = hops
        self._sent: dict[int, int] = {}
        self.close: Callable[[], None] = stream.close

    def send(self, message: Any) -> None:
        self._sent[message.round] = message.sent_ns or time.time_ns()
        self._stream.send(message)

    async def receive(self) -> Any:
        result = await self._stream.receive()
        now_ns = time.time_ns()
        if result.round in self._sent:
            sent_ns = self._sent.pop(result.round)
            self._hops.append(Hop(sent_ns, now_ns - sent_ns, result.timing.sent_ns - result.timing.received_ns, len(result.rows)))
        return result


async def serve_peer(kind: str, folder: Path, num_seqs: int, k: int, round_ms: float, *, has_costs: bool) -> None:
    peer = (
        RecordingVerifier(folder, num_seqs, k, _VERIFY_COST if has_costs else VerifyCost(), round_ms)
        if kind == "verifier"
        else RecordingDrafter(num_seqs, k, _DRAFT_COST if has_costs else ())
    )
    service = ScriptedService(peer, address_of(folder, kind))
    await service.start()
    await rpc.wait_for_stop_signal()
    await service.kill()
    (folder / f"{kind}.records").write_bytes(pickle.dumps(peer.records))


async def serve_echo(folder: Path) -> None:
    servicer = EchoServicer(folder)
    server = rpc.Server(
        [address_of(folder, "coordinator")], [SERVICE_NAME],
        lambda server: coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server),
    )  # fmt: skip
    await server.start()
    await servicer.connect()
    await server.set_serving(True)
    await rpc.wait_for_stop_signal()
    await server.stop(0)


async def serve_timed(folder: Path, num_seqs: int, k: int) -> None:
    hops: dict[str, list[Hop]] = {"verifier": [], "drafter": []}

    class TimedVerifier(GrpcVerifier):
        def open_stream(self) -> Any:
            return TimedStream(super().open_stream(), hops["verifier"])

    class TimedDrafter(GrpcDrafter):
        def open_stream(self) -> Any:
            return TimedStream(super().open_stream(), hops["drafter"])

    config = coordinator_config(folder, num_seqs, k)
    engine = Engine(config, TimedVerifier, TimedDrafter)
    server = CoordinatorServer(engine, config)
    await server.start()
    await engine.start()
    follower = asyncio.create_task(server.follow_readiness())
    await rpc.wait_for_stop_signal()
    follower.cancel()
    await asyncio.gather(engine.stop(0), server.stop(0))
    (folder / "coordinator.hops").write_bytes(pickle.dumps(hops))


def main() -> None:
    kind, folder, num_seqs, k, options = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
    round_ms = next((float(word.removeprefix("round_ms=")) for word in options if word.startswith("round_ms=")), 0.0)
    services = {"echo": lambda: serve_echo(folder), "timed-coordinator": lambda: serve_timed(folder, num_seqs, k)}
    run_service(kind, services.get(kind, lambda: serve_peer(kind, folder, num_seqs, k, round_ms, has_costs="costs" in options)))


if __name__ == "__main__":
    main()
