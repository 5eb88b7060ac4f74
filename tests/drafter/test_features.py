"""A drafter's reader of features: in memory and over gRPC it reads the same, and what can't be had is no fault."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drafter_svc.feature_counts import FAILED, GONE, GRPC, MEMORY, READ
from drafter_svc.features import FeatureReader, Located
from specwire.engine.features.device import DeviceMemory
from specwire.engine.features.pages import make_pool
from specwire.engine.features.pool import FeaturePool, PoolLayout, PoolSet
from specwire.engine.heads.source import FeatureSource
from specwire.errors import UnavailableError
from specwire.messages import FeatureHandle
from tests.engine.features.sources import eagle_source


class Span:
    def __init__(self, seq_id: int, first: int, num_positions: int) -> None:
        self.seq_id, self.first, self.num_positions = seq_id, first, num_positions


SOURCE = eagle_source(8, dtype=torch.bfloat16)
NUM_BLOCKS = 6


class ScriptedPath:
    """A way over gRPC that has no gRPC in it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: list[list[Located]] = []
        self.error: UnavailableError | None = None
        self.closed = False

    def read(self, spans: Sequence[Located]) -> list[torch.Tensor | None]:
        self.asked.append(list(spans))
        if self.error is not None:
            raise self.error
        return [None if span.generation == 13 else torch.full((span.num_positions, 8), float(span.first)) for span in spans]

    def close(self) -> None:
        self.closed = True


@dataclasses.dataclass
class Harness:
    """A reader whose ways over gRPC are scripted, and a clock to be set."""

    reader: FeatureReader
    paths: dict[str, ScriptedPath]
    now: list[float]


def make_reader(source: FeatureSource = SOURCE, **options: object) -> Harness:
    paths: dict[str, ScriptedPath] = {}
    now = [100.0]

    def connect(address: str, server_name: str) -> ScriptedPath:
        paths[address] = ScriptedPath(address)
        return paths[address]

    return Harness(FeatureReader(source, connect, clock=lambda: now[0], **options), paths, now)  # type: ignore[arg-type]


@pytest.fixture
def pool() -> FeaturePool:
    """A verifier's memory; each feature tells its row."""
    pool = make_pool([eagle_source(4, seed=5), SOURCE], 3, NUM_BLOCKS)
    pages = torch.frombuffer(pool.pages(SOURCE.hash), dtype=torch.bfloat16).view(-1, 8)
    pages.copy_(torch.arange(len(pages))[:, None].expand(-1, 8))
    return pool


def handle(
    pool: FeaturePool | None, blocks: Sequence[int], count: int, *, generation: int = 7, place: int = 1, address: str = "v:1"
) -> FeatureHandle:
    return FeatureHandle(1, 0, 1, "", "" if pool is None else pool.name, list(blocks), 0, count, generation, place, address)


def rows_of(blocks: Sequence[int], first: int, count: int) -> torch.Tensor:
    positions = range(first, first + count)
    return torch.tensor([[blocks[position // 16] * 16 + position % 16] * 8 for position in positions], dtype=torch.bfloat16)


def test_spans_are_read_out_of_the_verifiers_memory(pool):
    harness, tables = make_reader(), {4: [3, 0, 5], 9: [1]}
    pool.words[1], pool.words[2] = 7, 2**61
    harness.reader.note(4, handle(pool, tables[4][:2], 30))
    harness.reader.note(4, dataclasses.replace(handle(pool, tables[4][2:], 40), source=""))
    harness.reader.note(9, handle(pool, tables[9], 10, generation=2**61, place=2))
    assert [harness.reader.num_ready(4, n) for n in (1, 17, 41, 100)] == [0, 16, 40, 40]
    spans = [Span(4, 0, 40), Span(9, 3, 5), Span(4, 15, 2)]
    for span, found in zip(spans, harness.reader.read(spans), strict=True):
        assert found is not None
        assert torch.equal(found, rows_of(tables[span.seq_id], span.first, span.num_positions))
    counts = harness.reader.counts
    assert (counts.num_spans[MEMORY, READ], counts.num_bytes[MEMORY], counts.seconds[MEMORY].count) == (3, 47 * 16, 1)
    assert harness.paths == {}, "gRPC was not needed"
    reading = counts.take_reading()
    assert reading is not None
    assert (reading.num_bytes, reading.finished_ns >= reading.started_ns, counts.take_reading()) == (47 * 16, True, None)


def test_positions_follow_commits(pool):
    harness = make_reader()
    harness.reader.grew(4, 10)  # of a sequence that is not known yet
    assert harness.reader.num_ready(4, 20) == 0
    harness.reader.note(4, handle(pool, [0, 1], 12))
    harness.reader.grew(4, 17)
    harness.reader.grew(4, 15)
    assert harness.reader.num_ready(4, 100) == 17
    harness.reader.close(4)
    harness.reader.close(4)
    assert harness.reader.num_ready(4, 100) == 0


def test_a_sequence_that_left_its_place_is_not_read(pool, monkeypatch):
    """Before the copy, or while it is made."""
    harness = make_reader()
    pool.words[1] = 7
    harness.reader.note(4, handle(pool, [0], 10))
    harness.reader.note(5, handle(pool, [1], 10, generation=8, place=2))
    found = harness.reader.read([Span(5, 0, 2), Span(4, 0, 2)])
    assert [one is None for one in found] == [True, False]
    split = torch.Tensor.split

    def split_late(*args: object, **options: object) -> object:
        pool.words[1] = 0
        return split(*args, **options)

    monkeypatch.setattr(torch.Tensor, "split", split_late)
    assert harness.reader.read([Span(4, 0, 2)]) == [None]
    counts = harness.reader.counts
    assert (counts.num_spans[MEMORY, READ], counts.num_spans[MEMORY, GONE], counts.num_spans[MEMORY, FAILED]) == (1, 2, 0)


def test_a_new_generation_starts_over(pool):
    harness = make_reader()
    pool.words[1] = 7
    harness.reader.note(4, handle(pool, [0, 1], 20))
    pool.words[1] = 8
    harness.reader.note(4, handle(pool, [2], 5, generation=8))
    assert harness.reader.num_ready(4, 100) == 5
    [found] = harness.reader.read([Span(4, 0, 5)])
    assert found is not None
    assert torch.equal(found, rows_of([2], 0, 5))


@pytest.mark.parametrize("name", ["", "nonsense", "1/0/token", f"{2**22 + 1}/3/token"])
def test_memory_that_is_not_there_is_replaced_by_grpc(name, caplog):
    harness = make_reader()
    for seq_id in (4, 5):
        harness.reader.note(seq_id, dataclasses.replace(handle(None, [0], 10), source=name, server_name="verifier"))
    assert list(harness.paths) == ["v:1"]
    assert harness.reader.read([Span(4, 2, 3), Span(5, 1, 1)])[0].tolist() == [[2.0] * 8] * 3
    assert harness.paths["v:1"].asked == [[Located(1, 7, [0], 2, 3), Located(1, 7, [0], 1, 1)]], "one message for all sequences of a verifier"
    assert harness.reader.counts.num_unshared == bool(name)
    assert len([record for record in caplog.records if "come over gRPC" in record.message]) == bool(name), "said once"


def test_memory_of_another_process_with_the_same_numbers_is_not_taken_for_it(pool):
    process, descriptor, token = pool.name.split("/")
    with pytest.raises(UnavailableError, match="is not the verifier that shares its features"):
        FeaturePool.open(f"{process}/{descriptor}/{'0' * len(token)}")


def test_memory_without_these_features_is_not_used(pool, caplog):
    harness = make_reader(dataclasses.replace(SOURCE, hash="other"))
    harness.reader.note(4, handle(pool, [0], 10))
    assert list(harness.paths) == ["v:1"]
    assert "keeps no features of eagle (other)" in caplog.text


def test_memory_is_left_alone_where_the_configuration_says_so(pool):
    harness = make_reader(uses_memory=False)
    harness.reader.note(4, handle(pool, [0], 10))
    assert list(harness.paths) == ["v:1"]


def test_a_verifier_that_fails_rests_while_others_are_read(caplog):
    harness = make_reader()
    for seq_id, address in ((4, "v:1"), (5, "w:1")):
        harness.reader.note(seq_id, handle(None, [0], 10, address=address))
    harness.paths["v:1"].error = UnavailableError("nobody is there")
    spans = [Span(4, 0, 2), Span(5, 0, 2)]
    assert [one is None for one in harness.reader.read(spans)] == [True, False]
    assert [one is None for one in harness.reader.read(spans)] == [True, False]
    assert (len(harness.paths["v:1"].asked), len(harness.paths["w:1"].asked)) == (1, 2)
    assert (harness.reader.num_ready(4, 100), harness.reader.num_ready(5, 100)) == (0, 10)
    assert harness.reader.counts.num_spans[GRPC, FAILED] == 2
    assert "no features of v:1: nobody is there" in caplog.text
    harness.paths["v:1"].error = None
    harness.now[0] += 2.0
    assert harness.reader.num_ready(4, 100) == 10
    assert all(one is not None for one in harness.reader.read(spans))


@pytest.mark.parametrize(
    ("blocks", "count", "place", "message"),
    [
        ([0], 17, 1, "place 1 of 3 and position 17 of 16"),  # more positions than blocks
        ([], 1, 1, "position 1 of 0"),
        ([0, NUM_BLOCKS + 1], 20, 1, "names token 115 of 112"),
        ([-1], 3, 1, "of 112 in the verifier's memory"),
        ([0], 3, 3, "place 3 of 3"),
        ([0], 3, -1, "place -1 of 3"),
    ],
)
def test_handles_of_what_is_not_there_are_no_fault_of_the_drafter(pool, caplog, blocks, count, place, message):
    """Whatever a verifier says: nothing outside of its pages is read, and the batch goes on."""
    harness = make_reader()
    pool.words[:] = 7
    harness.reader.note(4, handle(pool, blocks, count, place=place))
    harness.reader.note(5, handle(None, [0], 10, address="w:1"))
    assert [one is None for one in harness.reader.read([Span(4, 0, count), Span(5, 0, 2)])] == [True, False]
    assert (harness.reader.counts.num_spans[MEMORY, FAILED], message in caplog.text) == (1, True), caplog.text


def test_a_verifier_that_nobody_uses_is_let_go_of_when_another_one_comes():
    harness = make_reader()
    harness.reader.note(4, handle(None, [0], 10, address="v:1"))
    harness.reader.close(4)
    assert not harness.paths["v:1"].closed, "it may come back"
    harness.reader.note(4, handle(None, [0], 10, address="w:1"))
    assert harness.paths["v:1"].closed
    harness.reader.stop()
    assert harness.paths["w:1"].closed


def device_pool(pages: torch.Tensor) -> FeaturePool:
    """Of a verifier whose pages are on a GPU."""
    memory = DeviceMemory("GPU-1", "aa", pages.nbytes, 0, "bb", 0, "cc", False)
    return FeaturePool.create(PoolLayout.make(2, NUM_BLOCKS, 16, [PoolSet(SOURCE.hash, 16, memory)]))


def test_pages_on_a_gpu_are_read_by_drafters_on_one(monkeypatch):
    """With a GPU that is made up: the pool has the words, and says what opens the pages."""
    pages = torch.arange((NUM_BLOCKS + 1) * 16, dtype=torch.bfloat16)[:, None].expand(-1, 8).contiguous()
    pool = device_pool(pages)
    assert pool.layout.num_bytes < pages.nbytes + (1 << 15), "the pool holds no pages"
    opened, waits = [], []
    monkeypatch.setattr("drafter_svc.feature_memory.open_pages", lambda *given: opened.append(given) or pages)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waits.append(pool.words[1])))
    harness = make_reader(device="cuda")
    pool.words[1] = 7
    harness.reader.note(4, handle(pool, [3, 0], 20))
    [found] = harness.reader.read([Span(4, 10, 8)])
    assert found is not None
    assert torch.equal(found, rows_of([3, 0], 10, 8))
    assert opened == [(DeviceMemory("GPU-1", "aa", pages.nbytes, 0, "bb", 0, "cc", False), torch.bfloat16, (len(pages), 8), "cuda")]
    assert waits == [7], "the copy is waited for before the word is looked at again"
    on_cpu = make_reader(device="cpu")
    on_cpu.reader.note(4, handle(pool, [3, 0], 20))
    assert list(on_cpu.paths) == ["v:1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_no_way(caplog):
    harness = make_reader(device="cuda")
    harness.reader.note(4, handle(device_pool(torch.zeros(1)), [0], 10))
    assert list(harness.paths) == ["v:1"]
    assert "on a GPU, and this process sees none" in caplog.text


@pytest.fixture
def held() -> Callable[[], int]:
    """Descriptors of this process."""
    return lambda: len(list(Path("/proc/self/fd").iterdir()))


def test_pools_keep_no_descriptors(pool, held):
    before = held()
    opened = [FeaturePool.open(pool.name) for _ in range(5)]
    assert np.all([one.words[0] == 0 for one in opened])
    del opened
    assert held() <= before + 1
