"""How a draft model gets the KV of prompts: in chunks, with the first drafts, or out of the prefix cache."""

import dataclasses

import pytest

from drafter_svc.method import Ask
from specwire.messages import RowStatus
from tests.drafter.draft_models import Make, catch_up, tokens
from tests.drafter.helpers import open_request


def test_long_prompts_catch_up_in_chunks_and_do_not_hold_up_short_ones(make: Make) -> None:
    method = make()
    method.open(0, open_request(tokens(400)))
    method.open(1, open_request(tokens(40, seed=1)))
    method.open(2, open_request(tokens(9, seed=2)))
    assert [drafts.status for drafts in method.propose([Ask(0, 2), Ask(1, 2), Ask(2, 2)])] == [
        RowStatus.CATCHING_UP, RowStatus.CATCHING_UP, RowStatus.OK,
    ]  # fmt: skip
    assert method.catch_up(64) == 64
    assert [drafts.status for drafts in method.propose([Ask(0, 2), Ask(1, 2)])] == [RowStatus.CATCHING_UP, RowStatus.OK]
    chunks = []
    while computed := method.catch_up(64):
        chunks.append(computed)
    assert chunks == [64] * 5 + [399 - (64 - 39) - 320]
    assert method.propose([Ask(0, 2)])[0].status is RowStatus.OK


def test_the_shortest_prompts_can_be_drafted_for_first_and_none_waits_for_ever(make: Make) -> None:
    """As many as a chunk holds, though all began at once; a quarter of each chunk is the oldest one's."""
    method = make(num_blocks=200)
    lengths = (300, 65, 65, 65, 65)
    for seq_id, length in enumerate(lengths):
        method.open(seq_id, open_request(tokens(length, seed=seq_id)))
    ready_after = {}
    for number in range(1, 20):
        method.catch_up(64)
        for seq_id, drafts in enumerate(method.propose([Ask(seq_id, 1) for seq_id in range(5)])):
            if drafts.status is RowStatus.OK:
                ready_after.setdefault(seq_id, number)
        if number % 2 and number < 14:
            newcomer = 5 + number // 2
            method.open(newcomer, open_request(tokens(49, seed=newcomer)))
        method.check_integrity()
    assert [ready_after[seq_id] for seq_id in range(1, 5)] == [1, 3, 5, 7]
    assert ready_after[0] <= -(-299 // 16), "short ones that keep coming must not keep the oldest one waiting"


def test_a_reopened_sequence_finds_its_prefix_in_the_cache(make: Make) -> None:
    method = make()
    method.open(0, open_request(tokens(200)))
    catch_up(method)
    method.close(0)
    method.open(0, open_request(tokens(200)))
    assert method.propose([Ask(0, 1)])[0].status is RowStatus.OK


def test_nothing_of_the_prefix_cache_is_shared_between_tenants(make: Make) -> None:
    method = make()
    request = open_request(tokens(100))
    nums_tokens = []
    for seq_id, tenant in enumerate((b"a", b"b", b"a", b"")):
        method.open(seq_id, dataclasses.replace(request, slot=seq_id, tenant_cache_key=tenant))
        before = method.counts.num_tokens
        catch_up(method)
        nums_tokens.append(method.counts.num_tokens - before)
        method.close(seq_id)
    assert nums_tokens == [99, 99, 0, 99]


@pytest.mark.parametrize("is_caught_up", [False, True])
def test_a_prompt_of_whole_blocks_that_is_cached_is_drafted_for_at_once(make: Make, is_caught_up: bool) -> None:
    """A block of it is computed again; before the first drafts are asked for, if there is time."""
    method = make()
    for seq_id in range(3):
        method.open(seq_id, open_request(tokens(64, seed=seq_id)))
    catch_up(method)
    for seq_id in range(3):
        method.close(seq_id)
        method.open(seq_id, open_request(tokens(64, seed=seq_id)))
    if is_caught_up:
        catch_up(method)
    before = method.counts.num_tokens
    for seq_id in range(3):
        method.append(seq_id, [5])
    assert {drafts.status for drafts in method.propose([Ask(seq_id, 1) for seq_id in range(3)])} == {RowStatus.OK}
    assert method.counts.num_tokens - before == 3 * (2 if is_caught_up else 17)
    assert not method.catch_up(64), "nothing is left to compute"


def test_what_is_computed_with_first_drafts_is_bounded_over_all_sequences(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_svc.backlog._MAX_INLINE_OF_ALL", 100)
    method = make()
    lengths = (32, 32, 1, 32, 32, 1)
    for seq_id, length in enumerate(lengths):
        method.open(seq_id, open_request(tokens(length, seed=seq_id)))
    asks = [Ask(seq_id, 1) for seq_id in range(len(lengths))]
    statuses = [drafts.status for drafts in method.propose(asks)]
    assert statuses == [RowStatus.OK] * 4 + [RowStatus.CATCHING_UP, RowStatus.OK]
    catch_up(method)
    assert {drafts.status for drafts in method.propose(asks)} == {RowStatus.OK}
