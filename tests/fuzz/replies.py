"""The coordinator under peers whose answers are changed: the other side of its streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from coordinator.engine import Engine
from specwire.config import CoordinatorConfig
from specwire.messages import GenerateRequest
from specwire.rpc import Server
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.fuzz.strategies import partial_messages
from tests.fuzz.targets import tracebacks
from tests.scripted import services
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript, ScriptedDrafter
from tests.scripted.verifier import ScriptedVerifier, VerifierScript
from tests.waiting import until

Changes = Mapping[int, Message]
"""For the n-th answer: fields that it gets in place of its own."""
_PROMPT = [5, 6, 7, 5, 6]
_NUM_TOKENS = 16
_SETTLE_S = 60.0


class _Changer:
    """Counts answers and changes those that are to be changed."""

    def __init__(self) -> None:
        self._changes: Changes = {}
        self._num_answers = 0

    def begin(self, changes: Changes) -> None:
        self._changes, self._num_answers = changes, 0

    async def change(self, answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for answer in answers:
            changes = self._changes.get(self._num_answers)
            self._num_answers += 1
            if changes is not None:
                for field, _ in changes.ListFields():
                    answer.ClearField(field.name)
                answer.MergeFrom(changes)
                if not answer.round:
                    # A verifier that is about to stop is waited for until it does, and this one never would.
                    answer.draining = False
            yield answer


class _Verifier(services._VerifierServicer):
    def __init__(self, verifier: ScriptedVerifier, changer: _Changer) -> None:
        super().__init__(verifier)
        self._changer = changer

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in self._changer.change(super().Verify(requests, context)):
            yield answer


class _Drafter(services._DrafterServicer):
    def __init__(self, drafter: ScriptedDrafter, changer: _Changer) -> None:
        super().__init__(drafter)
        self._changer = changer

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in self._changer.change(super().Draft(requests, context)):
            yield answer


class RepliesTarget:
    """A coordinator over gRPC to a verifier and a drafter in this process, one of which answers wrong things.

    Args:
        liar: verifier or drafter.
    """

    def __init__(self, liar: str) -> None:
        self._lies_as_verifier = liar == "verifier"
        self._changers = {"verifier": _Changer(), "drafter": _Changer()}
        self._liar = self._changers[liar]
        self._verifier = ScriptedVerifier(VerifierScript(max_model_len=64))
        self._num_tasks = 0
        descriptor: Descriptor = (verifier_pb2.VerifyResponse if self._lies_as_verifier else drafter_pb2.DraftResponse).DESCRIPTOR
        # The first answer is the welcome of the connection that is there already.
        self.strategy = st.dictionaries(st.integers(0, 10), partial_messages(descriptor), min_size=1, max_size=3)

    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[None]:
        """Runs all three."""
        drafter = ScriptedDrafter(DrafterScript(acceptance=0.7))
        verifier_servicer, drafter_servicer = _Verifier(self._verifier, self._changers["verifier"]), _Drafter(drafter, self._changers["drafter"])
        servers = [
            Server(
                [f"unix:{folder}/verifier"],
                ["specwire.v1.VerifierService"],
                lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier_servicer, server),
            ),
            Server(
                [f"unix:{folder}/drafter"],
                ["specwire.v1.DrafterService"],
                lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(drafter_servicer, server),
            ),
        ]
        for server in servers:
            await server.start()
        config = CoordinatorConfig(
            verifiers=(f"unix:{folder}/verifier",),
            drafters=(f"unix:{folder}/drafter",),
            # A drafter that is silent for a changed round number is waited for once a request.
            min_draft_wait_ms=50.0,
            speculative_config=SpeculativeConfig(num_speculative_tokens=3),
        )
        self._engine = Engine(config)
        # Answers that will never come are given up sooner than for users.
        with mock.patch("coordinator.asked_round.HUNG_S", 0.1), mock.patch("coordinator.link._LOST_S", 0.3):
            await self._engine.start()
            await self._connected()
            yield
            await self._engine.stop(0)
        for server in servers:
            await server.stop(0)

    async def check(self, changes: Changes) -> None:
        """One request while answers are changed, one after that. A drafter can't change a token; after a verifier's lies all goes on."""
        if not self._num_tasks:
            await self._generate()
            self._num_tasks = len(asyncio.all_tasks())
        self._liar.begin(changes)
        with tracebacks() as found:
            sink = await self._submit()
        self._liar.begin({})
        assert not found, "\n".join(found)
        if not self._lies_as_verifier:
            self._check(sink)
        await self._connected()
        await self._generate()
        await until(lambda: len(asyncio.all_tasks()) <= self._num_tasks, _SETTLE_S)

    async def _generate(self) -> None:
        self._check(await self._submit())
        await until(lambda: not any(lane.running or lane.in_flight for lane in self._engine.lanes), _SETTLE_S)
        self._engine.check_integrity()

    async def _submit(self) -> CollectingSink:
        sink = CollectingSink()
        self._engine.submit(GenerateRequest(_PROMPT, SamplingParams(max_tokens=_NUM_TOKENS, seed=1)), sink)
        async with asyncio.timeout(_SETTLE_S):
            await sink.wait()
        return sink

    def _check(self, sink: CollectingSink) -> None:
        choice = sink.choices[0]
        assert sink.error is None, sink.error
        assert choice.error is None, choice.error
        assert choice.token_ids == self._verifier.target.generate(_PROMPT, _NUM_TOKENS, 1)

    async def _connected(self) -> None:
        lanes = self._engine.lanes
        await until(lambda: self._engine.ready.is_ready and all(link.is_usable for lane in lanes for link in lane.links), _SETTLE_S)
