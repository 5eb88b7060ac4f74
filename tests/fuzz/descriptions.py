"""The coordinator under peers that describe themselves wrongly, and hand out wrong tokenizers."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from unittest import mock

from google.protobuf.message import Message
from hypothesis import strategies as st

from coordinator.engine import Engine
from specwire.config import CoordinatorConfig
from specwire.errors import SpecwireError
from specwire.messages import GenerateRequest, ServiceDescription, TokenizerSpec
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import types_pb2 as pb
from specwire.wire import describe
from tests.fuzz.strategies import partial_messages
from tests.fuzz.targets import tracebacks
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import ScriptedVerifier
from tests.waiting import until

Kind = TypeVar("Kind", bound=Message)
_PROMPT = [97, 98, 99]
_NUM_TOKENS = 8
_SETTLE_S = 60.0
_MOST_BYTES = 512 << 20


class _Verifier(ScriptedVerifier):
    """Its description and tokenizer have some other fields, as they come over the wire."""

    changes: Mapping[str, Message] = MappingProxyType({})

    def describe(self) -> ServiceDescription:
        return describe.unpack_description(_changed(describe.pack_description(super().describe()), self.changes.get("description")))

    def tokenizer(self) -> TokenizerSpec:
        return describe.unpack_tokenizer(_changed(describe.pack_tokenizer(super().tokenizer()), self.changes.get("tokenizer")))


class _Drafter(ScriptedDrafter):
    changes: Mapping[str, Message] = MappingProxyType({})

    def describe(self) -> ServiceDescription:
        return describe.unpack_description(_changed(describe.pack_description(super().describe()), self.changes.get("description")))


class DescriptionsTarget:
    """A coordinator whose verifier or drafter, in this process, says wrong things of itself.

    Args:
        liar: verifier or drafter.
        adaptive: with adaptive verification, which reads cost tables.
    """

    def __init__(self, liar: str, *, adaptive: bool = False) -> None:
        self._liar = liar
        self._adaptive = adaptive
        changes = {"description": partial_messages(pb.ServiceDescription.DESCRIPTOR)}
        if liar == "verifier":
            changes["tokenizer"] = partial_messages(pb.TokenizerSpec.DESCRIPTOR)
        self.strategy = st.one_of([st.fixed_dictionaries({name: strategy}) for name, strategy in changes.items()])

    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[None]:
        """Each check starts its own."""
        with mock.patch("coordinator.probe._PROBE_S", 0.05), mock.patch("coordinator.asked_round.HUNG_S", 0.1):
            yield

    async def check(self, changes: dict[str, Message]) -> None:
        """The peer is used or refused; no fault, no step that never ends, no memory for what it claims to have."""
        network = LocalNetwork()
        verifier, drafter = _Verifier(byte_verifier_script(max_model_len=64)), _Drafter(byte_drafter_script(acceptance=0.7))
        network.put("v:1", verifier)
        network.put("d:1", drafter)
        (verifier if self._liar == "verifier" else drafter).changes = changes
        config = CoordinatorConfig(
            verifiers=("v:1",), drafters=("d:1",), min_draft_wait_ms=50.0,
            speculative_config=SpeculativeConfig(num_speculative_tokens=3, enable_adaptive_verification=self._adaptive),
        )  # fmt: skip
        engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tracebacks() as found:
            try:
                await engine.start()
                if self._liar == "drafter":
                    await until(lambda: engine.ready.is_ready, _SETTLE_S)
                await self._generate(engine, verifier)
            except SpecwireError:
                assert self._liar == "verifier" or not engine.ready.is_ready, "a drafter costs no request"
            await engine.stop(0)
        engine.check_integrity()
        assert not found, "\n".join(found)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert grown < _MOST_BYTES, f"{grown >> 20} MiB more than before"

    async def _generate(self, engine: Engine, verifier: ScriptedVerifier) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while not engine.ready.is_ready:
                    await engine.readiness_changed()
        sink = CollectingSink()
        engine.submit(GenerateRequest(_PROMPT, SamplingParams(max_tokens=_NUM_TOKENS, seed=1)), sink)
        async with asyncio.timeout(_SETTLE_S):
            await sink.wait()
        if sink.error is None and sink.choices[0].error is None:
            tokens = sink.choices[0].token_ids
            assert tokens == verifier.target.generate(_PROMPT, _NUM_TOKENS, 1)[: len(tokens)]
        elif self._liar == "drafter":
            raise AssertionError(f"a drafter costs no request: {sink.error or sink.choices[0].error}")


def _changed(message: Kind, changes: Message | None) -> Kind:
    if changes is not None:
        for field, _ in changes.ListFields():
            message.ClearField(field.name)
        message.MergeFrom(changes)
    return message
