"""A drafter in the test's own process, and the client side of its stream."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from drafter_svc.method import Ask, Drafts, FeatureNotes, Method, build_method
from drafter_svc.server import DrafterServer
from specwire.config import DrafterConfig
from specwire.engine.counts import PassCounts
from specwire.messages import DraftOpen, DraftResult, DraftRound, Hello, RowStatus, ServiceDescription
from specwire.rpc import open_channel
from specwire.sampling_params import SamplingParams
from specwire.v1 import drafter_pb2 as pb
from specwire.v1 import drafter_pb2_grpc as pb_grpc
from specwire.wire import draft
from specwire.wire.describe import unpack_description


def open_request(
    token_ids: Sequence[int], *, slot: int = 0, epoch: int = 1, sampling: SamplingParams | None = None, noise_key: int = 7, choice: int = 0
) -> DraftOpen:
    """An Open with everything that tests don't care about filled in."""
    return DraftOpen(slot, epoch, list(token_ids), len(token_ids), sampling or SamplingParams(), noise_key, choice)


class ScriptedMethod:
    """A drafting method without a model: `propose(tokens, num_drafts)` makes the drafts; records what the service asked of it.

    emptied: set once the last open sequence was closed. features: hears of the target's features, if there is one.
    """

    features: FeatureNotes | None = None

    def __init__(self, propose: Callable[[list[int], int], list[int]] | None = None, *, max_num_drafts: int = 8, max_num_seqs: int = 64) -> None:
        self.sequences: dict[int, list[int]] = {}
        self.batches: list[list[Ask]] = []
        self.emptied = threading.Event()
        self.num_behind = 0
        self.num_chunks = 0
        self.counts = PassCounts()
        self._propose = propose or (lambda tokens, num_drafts: [tokens[-1] + 1 + i for i in range(num_drafts)])
        self._description = ServiceDescription("scripted", "", 0, 1 << 20, max_num_drafts, max_num_seqs, method="scripted")

    @property
    def description(self) -> ServiceDescription:
        return self._description

    @property
    def num_free_blocks(self) -> int:
        return 0

    def open(self, seq_id: int, request: DraftOpen) -> None:
        assert seq_id not in self.sequences
        self.sequences[seq_id] = list(request.token_ids)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.sequences[seq_id].extend(token_ids)

    def close(self, seq_id: int) -> None:
        del self.sequences[seq_id]
        if not self.sequences:
            self.emptied.set()

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        self.batches.append(list(asks))
        drafts = [self._propose(self.sequences[ask.seq_id], ask.num_drafts) for ask in asks]
        return [Drafts(RowStatus.OK, run, [0.5] * len(run)) for run in drafts]

    def catch_up(self, budget: int) -> int:
        if not self.num_behind:
            return 0
        self.num_behind -= 1
        self.num_chunks += 1
        return budget


@asynccontextmanager
async def serve_drafter(
    socket_dir: Path, config: DrafterConfig | None = None, build: Callable[[DrafterConfig], Method] = build_method, *, name: str = "drafter"
) -> AsyncIterator[DrafterServer]:
    """A drafter that listens on a Unix socket in `socket_dir` (its address: `server.addresses[0]`), ready, without measured costs.

    Args:
        config: its `listen` is replaced. Default: ngram.
        build: makes the method; `lambda _: ScriptedMethod(...)` for a scripted one.
        name: of the socket; one for each drafter of a test.
    """
    fields = {field: getattr(config or DrafterConfig(), field) for field in DrafterConfig.__dataclass_fields__}
    server = DrafterServer(DrafterConfig(**(fields | {"listen": (f"unix:{socket_dir}/{name}",)})), build, cost_budget_s=0)
    await server.start()
    try:
        await server.wait_ready()
        yield server
    finally:
        assert await server.stop()


class DraftClient:
    """The coordinator's side of one Draft stream."""

    def __init__(self, channel: grpc.aio.Channel, lane: int = 0) -> None:
        self._call = pb_grpc.DrafterServiceStub(channel).Draft()
        self._lane = lane
        self._round = 0

    async def hello(self, coordinator_id: str = "test") -> DraftResult:
        """Begins the stream; the welcome."""
        await self.send(DraftRound(1, self._lane, 0, hello=Hello(coordinator_id, 1, 2)))
        return await self.receive()

    async def ask(self, **parts: list) -> DraftResult:
        """One round with rows, and its answer."""
        await self.tell(**parts)
        return await self.receive()

    async def tell(self, **parts: list) -> int:
        """One round; its number."""
        self._round += 1
        await self.send(DraftRound(1, self._lane, self._round, **parts))
        return self._round

    async def send(self, message: DraftRound) -> None:
        await self._call.write(draft.pack_round(message))

    async def receive(self) -> DraftResult:
        """The next answer; grpc.aio.AioRpcError if the stream failed, EOFError if it ended."""
        response = await asyncio.wait_for(self._call.read(), 10)
        if response is grpc.aio.EOF:
            raise EOFError("the stream ended")
        return draft.unpack_result(response)

    async def finish(self) -> None:
        """Ends the sending side."""
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def draft_stream(address: str, lane: int = 0) -> AsyncIterator[DraftClient]:
    """A Draft stream whose welcome has come."""
    async with open_channel(address) as channel:
        client = DraftClient(channel, lane)
        await client.hello()
        yield client
        client.cancel()


async def describe(address: str) -> ServiceDescription:
    async with open_channel(address) as channel:
        reply = await pb_grpc.DrafterServiceStub(channel).Describe(pb.DrafterServiceDescribeRequest())
        return unpack_description(reply.description)
