"""What drafters are told of features, and what they read by it: through chunks, prefix hits, rejected drafts, reused slots."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from specwire.engine.batch import Segment
from specwire.engine.features.pages import project
from specwire.engine.features.pool import FeaturePool
from specwire.engine.heads.source import FeatureSource
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.runner import ModelRunner
from specwire.errors import InvalidArgumentError
from specwire.messages import FeatureHandle, FeaturePull, FeatureRange, RowStatus, SlotRef, VerifyResult
from tests.engine.features.sources import eagle3_source, eagle_source
from tests.verifier.harness import PROMPT, Rounds, ahead, decode, ids, make_verifier, open_message, prefill

SOURCES = (eagle3_source(2, 32), eagle_source(32))
LIMIT = 1 << 20
LONG = [(5 * index * index + index) % 59 + 1 for index in range(45)]


def true_features(model: Decoder, tokens: Sequence[int], source: FeatureSource) -> torch.Tensor:
    """Of all tokens, computed alone in one pass [n, width]."""
    num_blocks = len(tokens) // 16 + 1
    cache = KVCache(model.config, num_blocks, model.dtype, features=[source])
    runner = ModelRunner(model, cache)
    runner.forward(runner.batch([Segment(tokens, 0, range(num_blocks))]))
    assert cache.features is not None
    return cache.features.heads[0].pages.flatten(0, 1)[: len(tokens)]


class Reader:
    """Keeps what handles say, and reads what they promise."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.tables: dict[SlotRef, list[int]] = {}
        self.last: dict[SlotRef, FeatureHandle] = {}

    def take(self, result: VerifyResult) -> VerifyResult:
        for handle in result.features:
            ref = SlotRef(handle.slot, handle.epoch)
            if ref not in self.last or self.last[ref].generation != handle.generation:
                self.tables[ref] = []
            self.tables[ref] += handle.new_block_ids
            self.last[ref] = handle
        return result

    def read(self, source: FeatureSource, slot: int, first: int, count: int, *, epoch: int = 1) -> tuple[RowStatus, torch.Tensor]:
        handle = self.last[SlotRef(slot, epoch)]
        books = self.rounds.verifier.features
        assert books is not None
        pulled = books.read(FeaturePull(source.hash, [FeatureRange(handle.generation, first, count)]), LIMIT)
        data = torch.frombuffer(bytearray(pulled.data), dtype=source.dtype).view(-1, source.width) if pulled.data else torch.zeros(0, source.width)
        return pulled.statuses[0], data

    def check(self, model: Decoder, tokens: Sequence[int], slot: int, num_positions: int, *, epoch: int = 1) -> None:
        """All features of a sequence's first positions, over gRPC's way and by the handles' block ids."""
        books, ref = self.rounds.verifier.features, SlotRef(slot, epoch)
        assert books is not None
        for index, source in enumerate(SOURCES):
            expected = true_features(model, tokens, source)[:num_positions]
            status, found = self.read(source, slot, 0, num_positions, epoch=epoch)
            assert (status, len(found)) == (RowStatus.OK, num_positions)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            by_table = books._pages.heads[index].pages[self.tables[ref]].flatten(0, 1)[:num_positions]
            assert torch.equal(by_table, found), "the handles name other blocks than the verifier reads"
        assert self.read(SOURCES[0], slot, num_positions, 1, epoch=epoch)[0] is RowStatus.BAD, "positions that are not computed can be read"


@pytest.fixture
def make(make: Callable) -> Callable:
    return partial(make, features=SOURCES)


def test_chunks_run_ahead_and_rejected_drafts(model, make):
    """After each answer f_0 .. f_{n-2} of n committed tokens are there, whatever the rounds wrote behind them."""
    rounds = Rounds(make(model))
    reader = Reader(rounds)
    truth = ids(model, LONG, 12)
    result = reader.take(rounds.launch([prefill(0, 20)], opens=[open_message(0, LONG)]))
    assert [(handle.first_position, handle.num_positions, handle.place) for handle in result.features] == [(0, 20, 0)]
    reader.check(model, LONG, 0, 20)
    reader.take(rounds.launch([prefill(0, 5)]))
    reader.check(model, LONG, 0, 25)
    tokens = LONG + reader.take(rounds.launch([prefill(0, 200)])).rows[0].token_ids
    reader.check(model, tokens, 0, len(tokens) - 1)
    wrong = [(truth[1] + 1) % 60, 7, 7]
    for drafts in ([], wrong, truth[2:4], [*truth[len(tokens) - len(LONG) + 3 :][:1], 9, 9]):
        answer = reader.take(rounds.launch([decode(0, tokens, drafts)])).rows[0]
        tokens += answer.token_ids
        assert tokens == LONG + truth[: len(tokens) - len(LONG)]
        reader.check(model, tokens, 0, len(tokens) - 1)
    assert len(tokens) > len(LONG) + 5, "no draft was accepted"
    # Two rounds in flight, the second from a token that nobody has seen.
    first = rounds.start([decode(0, tokens)])
    second = rounds.start([ahead(0, len(tokens) + 1, rounds.round)])
    for launched in (first, second):
        tokens += reader.take(rounds.finish(launched)).rows[0].token_ids
        reader.check(model, tokens, 0, len(tokens) - 1)


def test_a_prefix_hit_brings_its_features(model, make):
    rounds = Rounds(make(model))
    reader = Reader(rounds)
    reader.take(rounds.launch([prefill(0, 200)], opens=[open_message(0, LONG)]))
    other = [*LONG[:36], 1, 2, 3]
    result = reader.take(rounds.launch([prefill(3, 200)], opens=[open_message(3, other)]))
    assert result.rows[0].num_cached_tokens == 32
    reader.check(model, other, 3, len(other))
    # And once the sequence that computed them is gone.
    reader.take(rounds.launch([prefill(4, 200)], opens=[open_message(4, other)], closes=[SlotRef(0, 1), SlotRef(3, 1)]))
    reader.check(model, other, 4, len(other))
    assert reader.read(SOURCES[0], 3, 0, 1)[0] is RowStatus.STALE


def test_a_slot_that_is_opened_anew_has_another_generation_and_other_features(model, make):
    rounds = Rounds(make(model, enable_prefix_cache=False, num_blocks=8))
    reader = Reader(rounds)
    reader.take(rounds.launch([prefill(0, 200)], opens=[open_message(0, PROMPT)]))
    old = reader.last[SlotRef(0, 1)]
    reader.check(model, PROMPT, 0, len(PROMPT))
    reader.take(rounds.launch([prefill(0, 200, epoch=2)], opens=[open_message(0, LONG, epoch=2)], closes=[SlotRef(0, 1)]))
    new = reader.last[SlotRef(0, 2)]
    assert (new.place, new.generation != old.generation) == (old.place, True)
    reader.check(model, LONG, 0, len(LONG), epoch=2)
    assert reader.read(SOURCES[0], 0, 0, 1)[0] is RowStatus.STALE
    rounds.verifier.reset()
    assert reader.read(SOURCES[0], 0, 0, 1, epoch=2)[0] is RowStatus.STALE


def test_a_slot_that_never_lived_and_one_that_died_tell_nothing(model, make):
    rounds = Rounds(make(model))
    bad = open_message(0, [10_000])
    result = rounds.launch([prefill(0, 200), prefill(1, 200)], opens=[bad, open_message(1, PROMPT)])
    assert [row.status for row in result.rows] == [RowStatus.BAD, RowStatus.OK]
    assert [handle.slot for handle in result.features] == [1]
    result = rounds.launch([decode(1, [*PROMPT, 60])])
    assert (result.rows[0].status, result.features) == (RowStatus.BAD, [])
    rounds.launch(closes=[SlotRef(0, 1), SlotRef(1, 1)])


def test_answers_without_heads_have_no_handles(model):
    rounds = Rounds(make_verifier(model))
    assert rounds.launch([prefill(0, 200)], opens=[open_message(0, PROMPT)]).features == []


def test_source_and_blocks_are_told_once(model, make):
    rounds = Rounds(make(model, shares_features=True))
    result = rounds.launch([prefill(0, 200)], opens=[open_message(0, PROMPT)])
    pages = rounds.verifier.features._pages
    assert [handle.source for handle in result.features] == [pages.pool.name]
    tokens, handles = [*PROMPT, *result.rows[0].token_ids], []
    for _ in range(12):
        answer = rounds.launch([decode(0, tokens)])
        tokens += answer.rows[0].token_ids
        handles += answer.features
    assert [(handle.source, len(handle.new_block_ids)) for handle in handles] == [("", 1)], "one more block, and no word of it otherwise"


def test_shared_pages_are_what_is_read_elsewhere(model, make):
    rounds = Rounds(make(model, shares_features=True))
    reader = Reader(rounds)
    reader.take(rounds.launch([prefill(2, 200)], opens=[open_message(2, LONG)]))
    reader.check(model, LONG, 2, len(LONG))
    handle = reader.last[SlotRef(2, 1)]
    pool = FeaturePool.open(handle.source)
    assert pool.words[handle.place] == handle.generation
    for source in SOURCES:
        rows = torch.from_numpy(pool.rows(source.hash)[[block * 16 + offset for block in handle.new_block_ids for offset in range(16)]].copy())
        assert torch.equal(rows.view(source.dtype)[: len(LONG)], reader.read(source, 2, 0, len(LONG))[1])
    rounds.launch(closes=[SlotRef(2, 1)])
    assert pool.words[handle.place] == 0


def test_what_cannot_be_answered_is_refused_with_the_numbers(model, make):
    books = make(model).features
    with pytest.raises(InvalidArgumentError, match=r"features other are not kept here, but those of eagle3 \(eagle3-0\), eagle \(eagle-0\)"):
        books.read(FeaturePull("other", []), LIMIT)
    with pytest.raises(InvalidArgumentError, match="1 ranges have 12800 bytes of features, but an answer may have 1000"):
        books.read(FeaturePull("eagle-0", [FeatureRange(1, 0, 100)]), 1000)
    assert books.read(FeaturePull("eagle-0", [FeatureRange(1, 0, 5), FeatureRange(2, -1, 5)]), LIMIT).statuses == [RowStatus.STALE] * 2


def test_a_sequence_that_ends_while_it_is_copied_is_stale(model, make, monkeypatch):
    """Its blocks may have been anybody's by then; the other one's data stays."""
    rounds = Rounds(make(model))
    reader = Reader(rounds)
    reader.take(rounds.launch([prefill(0, 100), prefill(1, 100)], opens=[open_message(0, PROMPT), open_message(1, LONG)]))
    books, source = rounds.verifier.features, SOURCES[1]
    copy = books._copy

    def copy_and_close(*args: object) -> object:
        data = copy(*args)
        rounds.launch(closes=[SlotRef(0, 1)])
        return data

    monkeypatch.setattr(books, "_copy", copy_and_close)
    ranges = [FeatureRange(reader.last[SlotRef(slot, 1)].generation, 2, 4) for slot in (0, 1)]
    pulled = books.read(FeaturePull(source.hash, ranges), LIMIT)
    assert pulled.statuses == [RowStatus.STALE, RowStatus.OK]
    found = torch.frombuffer(bytearray(pulled.data), dtype=source.dtype).view(-1, source.width)
    torch.testing.assert_close(found, true_features(model, LONG, source)[2:6], atol=1e-4, rtol=1e-4)


def test_features_of_the_round_runner_are_projected_like_the_model_runners(model):
    """`project` itself, on states that were taken by hand."""
    source = SOURCES[0]
    states = [torch.randn(3, 32) for _ in source.layer_ids]
    assert source.projection is not None
    torch.testing.assert_close(project(source, states), torch.cat(states, -1) @ source.projection.T)
