"""Block ownership and prefix cache: hand-made cases, and random histories against a brute-force model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.engine.block_manager import BlockManager

BLOCK = 4


def run_to_end(manager: BlockManager, seq_id: int, tokens: list[int], cache_key: bytes = b"") -> int:
    """Opens, computes and finalises all tokens; returns how many came from the prefix cache."""
    hit = manager.open(seq_id, tokens, cache_key)
    assert manager.reserve(seq_id, len(tokens))
    manager.finalize(seq_id, tokens[hit:])
    return hit


def test_reserve_takes_whole_blocks_and_close_returns_them():
    manager = BlockManager(10, BLOCK)
    manager.open(7, [1, 2, 3])
    assert manager.num_free_blocks == 10
    assert manager.reserve(7, 9)
    assert len(manager.block_table(7)) == 3
    assert manager.reserve(7, 5), "capacity for fewer tokens is there already"
    assert manager.num_free_blocks == 7
    manager.close(7)
    assert manager.num_free_blocks == 10
    manager.check_integrity()


def test_out_of_blocks_concerns_one_sequence_and_changes_nothing():
    manager = BlockManager(3, BLOCK)
    for seq_id in (0, 1):
        manager.open(seq_id, [1])
        assert manager.reserve(seq_id, 4)
    assert manager.num_missing_blocks(0, 12) == 2
    assert not manager.reserve(0, 12)
    assert len(manager.block_table(0)) == 1
    assert manager.num_free_blocks == 1
    assert manager.reserve(1, 8)
    manager.check_integrity()


@pytest.mark.parametrize(("length", "expected_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_prefix_hit_leaves_the_last_token_to_compute(length, expected_hit):
    manager = BlockManager(20, BLOCK)
    tokens = list(range(12))
    run_to_end(manager, 0, tokens)
    assert manager.open(1, [*tokens, 99][:length]) == expected_hit
    assert manager.block_table(1) == manager.block_table(0)[: expected_hit // BLOCK]
    manager.check_integrity()


def test_blocks_that_are_cached_later_can_be_looked_up_before_the_first_reservation():
    manager = BlockManager(8, 4)
    prompt = list(range(14))
    assert manager.open(0, prompt) == manager.open(1, prompt) == 0
    manager.reserve(0, 14)
    manager.finalize(0, prompt[:10])
    assert manager.look_up(1, prompt) == 8
    manager.finalize(0, prompt[10:])
    assert manager.look_up(1, prompt) == 12
    assert manager.look_up(1, prompt) == 12
    assert manager.block_table(1) == manager.block_table(0)[:3]
    manager.check_integrity()
    manager.reserve(1, 14)
    manager.finalize(1, prompt[12:])
    with pytest.raises(AssertionError):
        manager.look_up(1, prompt)
    manager.close(0)
    manager.close(1)
    manager.check_integrity()


def test_prefix_hits_need_equal_keys_and_an_equal_beginning():
    manager = BlockManager(40, BLOCK)
    tokens = list(range(8))
    run_to_end(manager, 0, tokens, b"tenant-a")
    assert manager.open(1, [*tokens, 9], b"tenant-b") == 0
    assert manager.open(2, [50, *tokens, 9], b"tenant-a") == 0
    assert manager.open(3, [*tokens[:4], 50, 51, 52, 53, 9], b"tenant-a") == 4
    assert manager.open(4, [*tokens, 9], b"tenant-a") == 8


def test_cached_blocks_count_as_free_and_are_evicted_oldest_first():
    manager = BlockManager(4, BLOCK)
    first, second = [1] * 8, [2] * 8
    for seq_id, tokens in enumerate((first, second)):
        run_to_end(manager, seq_id, tokens)
        manager.close(seq_id)
    assert manager.num_free_blocks == 4
    manager.open(2, [3])
    assert manager.reserve(2, BLOCK), "one cached block must give way"
    # The end of the older chain went, its beginning is still there; the younger chain is whole.
    assert manager.open(3, [*first, 0]) == 4
    assert manager.open(4, [*second, 0]) == 8
    assert manager.num_free_blocks == 0
    manager.check_integrity()


def test_a_block_in_use_is_not_evicted():
    manager = BlockManager(3, BLOCK)
    run_to_end(manager, 0, [1] * 8)
    manager.close(0)
    assert manager.open(1, [1] * 9) == 8
    manager.open(2, [5])
    assert manager.reserve(2, 4)
    assert not manager.reserve(2, 5)
    assert manager.open(3, [1] * 9) == 8
    manager.check_integrity()


def test_rollback_keeps_blocks_and_never_registers_drafts():
    manager = BlockManager(8, BLOCK)
    manager.open(0, [1, 2, 3])
    assert manager.reserve(0, 3 + 6)
    manager.finalize(0, [1, 2, 3])
    manager.set_computed(0, 9)
    manager.set_computed(0, manager.num_final_tokens(0))
    assert manager.num_computed_tokens(0) == 3
    assert len(manager.block_table(0)) == 3
    manager.finalize(0, [40])
    assert manager.open(1, [1, 2, 3, 40, 0]) == 4
    assert manager.open(2, [1, 2, 3, 4, 0]) == 0
    with pytest.raises(AssertionError, match="4 are final"):
        manager.set_computed(0, 3)
    manager.check_integrity()


def test_forget_drops_unshared_blocks_from_the_cache():
    manager = BlockManager(8, BLOCK)
    run_to_end(manager, 0, [1] * 8)
    manager.close(0, forget=True)
    assert manager.open(1, [1] * 9) == 0
    assert manager.num_free_blocks == 8
    manager.check_integrity()


def test_a_switched_off_cache_gives_no_hits():
    manager = BlockManager(8, BLOCK, enable_prefix_cache=False)
    run_to_end(manager, 0, [1] * 8)
    assert manager.open(1, [1] * 9) == 0
    manager.close(0)
    manager.close(1)
    assert manager.num_free_blocks == 8
    manager.check_integrity()


@dataclass
class Model:
    """What blocks must hold: for every block, the (key, tokens up to its end) that it was finalised with; None if unknown."""

    content: dict[int, tuple[bytes, tuple[int, ...]]] = field(default_factory=dict)
    sequences: dict[int, tuple[bytes, list[int]]] = field(default_factory=dict)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "advance", "advance", "draft", "close", "forget", "starve"]),
        st.integers(0, 5),
        st.integers(0, 11),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(operations=OPERATIONS, num_blocks=st.integers(3, 14))
def test_random_histories(operations, num_blocks):
    """Whatever is opened, advanced, drafted and closed: no block has two owners unless it holds the same tokens for both, a hit gives
    exactly what was computed, a refused reservation changes nothing, and in the end all blocks are free."""
    manager, model = BlockManager(num_blocks, BLOCK), Model()

    def note_final(seq_id: int) -> None:
        key, tokens = model.sequences[seq_id]
        for index in range(manager.num_final_tokens(seq_id) // BLOCK):
            entry = (key, tuple(tokens[: (index + 1) * BLOCK]))
            model.content[manager.block_table(seq_id)[index]] = entry

    for name, seq_id, size, flavour in operations:
        if name == "open" and seq_id not in model.sequences:
            key = b"k%d" % (flavour % 2)
            tokens = [flavour // 2] * (size + 1)
            hit = manager.open(seq_id, tokens, key)
            assert hit % BLOCK == 0
            assert hit < len(tokens)
            for index, block in enumerate(manager.block_table(seq_id)):
                assert model.content[block] == (key, tuple(tokens[: (index + 1) * BLOCK]))
            model.sequences[seq_id] = (key, tokens[:hit])
        elif seq_id not in model.sequences:
            continue
        elif name in ("advance", "draft"):
            tokens = model.sequences[seq_id][1]
            before = list(manager.block_table(seq_id))
            free_before = manager.num_free_blocks
            needed = manager.num_missing_blocks(seq_id, len(tokens) + size)
            granted = manager.reserve(seq_id, len(tokens) + size)
            assert granted == (needed <= free_before)
            after = list(manager.block_table(seq_id))
            assert after[: len(before)] == before
            assert len(after) - len(before) == (needed if granted else 0)
            assert manager.num_free_blocks == free_before - (needed if granted else 0)
            for block in after[len(before) :]:
                model.content.pop(block, None)
            if granted and name == "advance":
                new = [flavour // 2] * size
                manager.finalize(seq_id, new)
                tokens.extend(new)
                note_final(seq_id)
            elif granted:
                manager.set_computed(seq_id, len(tokens) + size)
                manager.set_computed(seq_id, manager.num_final_tokens(seq_id))
        elif name in ("close", "forget"):
            manager.close(seq_id, forget=name == "forget")
            del model.sequences[seq_id]
        elif name == "starve":
            assert not manager.reserve(seq_id, (num_blocks + 1) * BLOCK)
        manager.check_integrity()
        owners: dict[int, set] = {}
        for other, (key, tokens) in model.sequences.items():
            for index, block in enumerate(manager.block_table(other)):
                whole = (index + 1) * BLOCK <= len(tokens)
                owners.setdefault(block, set()).add((key, tuple(tokens[: (index + 1) * BLOCK])) if whole else ("private", other))
        assert all(len(contents) == 1 for contents in owners.values()), owners
    for seq_id in list(model.sequences):
        manager.close(seq_id)
    assert manager.num_free_blocks == num_blocks
    manager.check_integrity()


def test_blocks_of_a_closed_sequence_can_be_forgotten_unless_somebody_else_holds_them() -> None:
    manager = BlockManager(8, 4)
    tokens = list(range(12))
    manager.open(0, tokens)
    assert manager.reserve(0, 12)
    manager.finalize(0, tokens)
    cached = manager.cached_blocks(0)
    assert [block for block, _ in cached] == manager.block_table(0)
    manager.close(0)
    assert manager.open(1, [*tokens[:4], 99]) == 4  # holds the first block again
    manager.forget(cached)
    manager.check_integrity()
    assert manager.num_free_blocks == 7
    assert manager.open(2, tokens) == 4
    manager.close(2)
    manager.close(1)
    manager.forget([(block, b"of another sequence") for block, _ in cached])
    assert manager.open(3, tokens) == 4
    manager.check_integrity()
