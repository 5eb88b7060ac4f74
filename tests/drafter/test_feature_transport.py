"""From a real verifier to a drafter's reader: the same features in memory and over gRPC, in pieces, and when one of both restarts."""

import asyncio
import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from drafter_svc.draft_head import FeatureSpan
from drafter_svc.feature_counts import FAILED, GONE, GRPC, MEMORY, READ
from drafter_svc.features import FeatureReader, Located
from drafter_svc.rpc import PulledStream
from specwire.engine.heads.source import FeatureSource
from specwire.engine.models.decoder import Decoder
from specwire.errors import UnavailableError, UnsupportedError
from specwire.messages import FeatureHandle, SlotRef
from tests.engine.features.sources import eagle3_source, eagle_source
from tests.verifier.harness import GREEDY, Rounds, Served, VerifyStream, decode, make_verifier, open_message, prefill, serve, tiny_model
from tests.verifier.test_features import LONG, true_features

SOURCES = (eagle3_source(2, 32, dtype=torch.bfloat16), eagle_source(32))
LIMIT = 1 << 26


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_model()


def make_reader(source: FeatureSource, *, uses_memory: bool, max_message_bytes: int = LIMIT) -> FeatureReader:
    return FeatureReader(
        source, lambda address, name: PulledStream(address, name, source, max_message_bytes, None, timeout_s=20.0), uses_memory=uses_memory
    )


class Run:
    """One sequence at a served verifier, as a coordinator would drive it; keeps its handles with an address."""

    def __init__(self, served: Served, stream: VerifyStream) -> None:
        self.served, self.stream = served, stream
        self.rounds = Rounds(served.verifier)
        self.tokens: list[int] = list(LONG)
        self.handles: list[FeatureHandle] = []

    async def start(self, budget: int = 200) -> None:
        await self.run([prefill(0, budget)], opens=[open_message(0, LONG, GREEDY)])

    async def run(self, rows: Sequence, **fields: object) -> None:
        result = await self.stream.round_trip(self.rounds.build(rows, **fields))
        assert result is not None
        self.tokens += result.rows[0].token_ids if result.rows else []
        self.handles += [dataclasses.replace(handle, address=self.served.address) for handle in result.features]

    def whole(self) -> FeatureHandle:
        """What a drafter hears that is new to the sequence."""
        blocks = [block for handle in self.handles for block in handle.new_block_ids]
        return dataclasses.replace(self.handles[0], new_block_ids=blocks, num_positions=len(self.tokens) - 1)


async def read(reader: FeatureReader, *spans: FeatureSpan) -> list[torch.Tensor | None]:
    """In a thread, as the worker's; the verifier is in this loop."""
    return await asyncio.to_thread(reader.read, spans)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
async def test_both_ways_read_what_the_model_computed(model, socket_dir: Path, source):
    readers = {MEMORY: make_reader(source, uses_memory=True), GRPC: make_reader(source, uses_memory=False)}
    async with serve(make_verifier(model, features=SOURCES, shares_features=True), socket_dir) as served:
        stream = served.stream()
        await stream.start()
        sequence = Run(served, stream)
        await sequence.start()
        for reader in readers.values():
            reader.note(7, sequence.whole())
        num_told = 1
        for drafts in ([], [3, 3, 3], [], [5], []):
            await sequence.run([decode(0, sequence.tokens, drafts)])
            num_positions = len(sequence.tokens) - 1
            true = true_features(model, sequence.tokens, source)[:num_positions].float()
            found = []
            for reader in readers.values():
                for handle in sequence.handles[num_told:]:
                    reader.note(7, handle)
                reader.grew(7, num_positions)
                assert reader.num_ready(7, len(sequence.tokens)) == num_positions
                spans = FeatureSpan(7, 0, num_positions), FeatureSpan(7, num_positions - 2, 2)
                whole, tail = await read(reader, *spans)
                assert whole is not None
                assert tail is not None
                assert torch.equal(whole[-2:], tail)
                found.append(whole)
            num_told = len(sequence.handles)
            assert torch.equal(*found), "memory and gRPC differ"
            torch.testing.assert_close(found[0].float(), true, atol=2e-2 if source.dtype is torch.bfloat16 else 1e-4, rtol=1e-2)
        # A drafter that is started anew in the middle hears all of it, and needs no row of the verifier.
        late = make_reader(source, uses_memory=True)
        late.note(3, sequence.whole())
        [again] = await read(late, FeatureSpan(3, 0, num_positions))
        assert again is not None
        assert torch.equal(again, found[0])
        await sequence.run([], closes=[SlotRef(0, 1)])
        for path, reader in readers.items():
            assert await read(reader, FeatureSpan(7, 0, 4)) == [None]
            counts = reader.counts
            assert (counts.num_spans[path, READ], counts.num_spans[path, GONE], counts.num_spans[path, FAILED]) == (10, 1, 0)
            reader.stop()


async def test_an_answer_that_would_be_large_is_asked_for_in_pieces(model, socket_dir: Path):
    """A message of so few bytes holds 8 tokens; spans are cut, and small ones share a message."""
    source = SOURCES[1]
    async with serve(make_verifier(model, features=[source]), socket_dir) as served:
        stream = served.stream()
        await stream.start()
        sequence = Run(served, stream)
        await sequence.start()
        reader = make_reader(source, uses_memory=True, max_message_bytes=2 * 8 * 32 * 4)
        reader.note(1, sequence.whole())
        spans = [FeatureSpan(1, 0, 45), FeatureSpan(1, 3, 2), FeatureSpan(1, 40, 5), FeatureSpan(1, 10, 17)]
        found = await read(reader, *spans)
        true = true_features(model, sequence.tokens, source)
        for span, features in zip(spans, found, strict=True):
            assert features is not None
            torch.testing.assert_close(features, true[span.first : span.first + span.num_positions], atol=1e-4, rtol=1e-4)
        assert served.verifier.features is not None
        assert sum(served.verifier.features.num_pulled.values()) == 6 + 1 + 1 + 3
        reader.stop()


async def test_a_verifier_that_comes_back_is_read_again(model, socket_dir: Path):
    """The stream of features is opened anew; sequences of the old verifier are gone, not mistaken for new ones."""
    source, now = SOURCES[0], [0.0]
    address = f"unix:{socket_dir}/v.sock"
    reader = FeatureReader(source, lambda where, name: PulledStream(where, name, source, LIMIT, None, timeout_s=20.0), clock=lambda: now[0])

    async def run_once(seq_id: int) -> None:
        verifier = make_verifier(model, features=SOURCES)
        async with serve(verifier, socket_dir) as served:
            (socket_dir / "v.sock").unlink(missing_ok=True)
            (socket_dir / "v.sock").symlink_to(served.address.removeprefix("unix:"))
            stream = served.stream()
            await stream.start()
            sequence = Run(served, stream)
            await sequence.start()
            reader.note(seq_id, dataclasses.replace(sequence.whole(), address=address))
            [found] = await read(reader, FeatureSpan(seq_id, 0, 45))
            assert found is not None
            if seq_id == 2:
                assert await read(reader, FeatureSpan(1, 0, 5)) == [None]

    await run_once(1)
    assert await read(reader, FeatureSpan(1, 0, 5)) == [None]
    assert (reader.num_ready(1, 50), reader.counts.num_spans[GRPC, FAILED]) == (0, 1)
    now[0] += 100.0
    await run_once(2)
    assert reader.counts.num_spans[GRPC, GONE] == 1
    reader.stop()


async def test_a_verifier_without_heads_fails_by_name(model, socket_dir: Path):
    async with serve(make_verifier(model), socket_dir) as served:
        path = PulledStream(served.address, "", SOURCES[0], LIMIT, None, timeout_s=20.0)
        with pytest.raises(UnsupportedError, match="start it with --features"):
            await asyncio.to_thread(path.read, [Located(0, 5, [0], 0, 3)])
        path.close()


def test_one_that_says_nothing_is_not_waited_for_for_ever():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        path = PulledStream(f"127.0.0.1:{silent.getsockname()[1]}", "", SOURCES[0], LIMIT, None, timeout_s=0.2)
        with pytest.raises(UnavailableError, match=r"its features did not come within 0\.2 s"):
            path.read([Located(0, 5, [0], 0, 3)])
