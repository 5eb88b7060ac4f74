"""Rounds on a verifier in process: prefill, prefix cache, freshness, run-ahead, blocks."""

import pytest

from specwire.messages import RowStatus, SlotRef, VerifyRow
from specwire.sampling_params import SamplingParams
from tests.verifier.harness import GREEDY, PROMPT, Rounds, ahead, decode, ids, open_message, prefill

OK, STALE, OUT_OF_BLOCKS, BAD = RowStatus.OK, RowStatus.STALE, RowStatus.OUT_OF_BLOCKS, RowStatus.BAD


# --- prefill, decode, drafts ----------------------------------------------------------------------------------------


def test_prefill_in_one_chunk_samples_the_first_token(model, rounds):
    result = rounds.open(3, PROMPT)
    assert result == (OK, len(PROMPT), 0, 0, ids(model, PROMPT, 1), None, "")


@pytest.mark.parametrize("budgets", [(3, 3, 3), (1,) * 7, (6, 1), (7,), (5, 100)])
def test_prefill_chunks_equal_one_pass(model, rounds, budgets):
    expected = ids(model, PROMPT, 1)
    rounds.launch(opens=[open_message(0, PROMPT)])
    computed = 0
    for budget in budgets:
        row = rounds.launch([prefill(0, budget)]).rows[0]
        computed = min(computed + budget, len(PROMPT))
        assert (row.status, row.num_computed_tokens) == (OK, computed)
        assert row.token_ids == (expected if computed == len(PROMPT) else [])
        if computed == len(PROMPT):
            break
    tokens = PROMPT + expected
    assert rounds.launch([decode(0, tokens)]).rows[0].token_ids == ids(model, tokens, 1)


def test_a_chunk_that_finds_nothing_left_runs_and_a_row_may_follow_it(model, rounds):
    expected = ids(model, PROMPT, 3)
    rounds.launch([prefill(0, 100)], opens=[open_message(0, PROMPT)])
    empty = rounds.launch([prefill(0, 100)]).rows[0]
    assert (empty.status, empty.num_computed_tokens, empty.token_ids) == (OK, len(PROMPT), [])
    # The token before the empty chunk is the one that FROM_ROUND means.
    assert rounds.launch([ahead(0, len(PROMPT) + 1, 2)]).rows[0].token_ids == expected[1:2]
    assert rounds.launch([decode(0, PROMPT + expected[:2])]).rows[0].token_ids == expected[2:]


@pytest.mark.parametrize("num_right", range(9))
def test_drafts_are_accepted_up_to_the_first_wrong_one(model, rounds, num_right):
    truth = ids(model, PROMPT, 10)
    first = rounds.open(0, PROMPT).token_ids
    drafts = [token if j < num_right else (token + 1) % 61 for j, token in enumerate(truth[1:9])]
    row = rounds.launch([decode(0, PROMPT + first, drafts)]).rows[0]
    assert (row.status, row.num_accepted, row.token_ids) == (OK, num_right, truth[1 : num_right + 2])
    assert row.num_computed_tokens == len(PROMPT) + 1 + num_right
    tokens = PROMPT + first + row.token_ids
    assert rounds.launch([decode(0, tokens)]).rows[0].token_ids == ids(model, tokens, 1)


def test_reopening_with_output_continues_the_same_text(model, rounds):
    sampling = SamplingParams(temperature=1.0, max_tokens=None, min_tokens=12, presence_penalty=0.5)
    truth = ids(model, PROMPT, 8, sampling, key=11)
    result = rounds.open(0, PROMPT + truth[:5], sampling, num_prompt_tokens=len(PROMPT), noise_key=11)
    assert result.token_ids == truth[5:6]


# --- prefix cache ---------------------------------------------------------------------------------------------------


def test_prefix_hits_skip_computation_and_change_nothing(model, rounds):
    prompt = [(7 * i) % 61 for i in range(50)]
    cold = rounds.open(0, prompt)
    warm = rounds.launch([prefill(1, 200)], opens=[open_message(1, prompt)])
    assert warm.num_padded_tokens == 2  # 48 of 50 tokens are in full blocks
    assert warm.rows[0] == cold._replace(num_cached_tokens=48)


def test_prefix_hits_make_later_queued_chunks_empty(model, rounds):
    prompt = [(7 * i) % 61 for i in range(50)]
    first = rounds.open(0, prompt).token_ids
    rows = [rounds.launch([prefill(1, 25)], opens=[open_message(1, prompt)]).rows[0], rounds.launch([prefill(1, 25)]).rows[0]]
    assert [(row.status, row.token_ids) for row in rows] == [(OK, first), (OK, [])]
    assert rounds.launch([ahead(1, 51, rounds.round)]).rows[0].status == OK


def test_a_slot_opened_ahead_takes_what_is_cached_until_its_first_row(model, make):
    """And the answer to its Open says what was cached then."""
    rounds = Rounds(make(model))
    prompt = [(7 * i) % 61 for i in range(50)]
    first = rounds.open(0, prompt[:20]).token_ids
    opened = rounds.launch([decode(0, prompt[:20] + first)], opens=[open_message(1, prompt), open_message(2, PROMPT)])
    assert opened.opened_num_cached_tokens == [16, 0]
    rounds.open(3, prompt)
    row = rounds.launch([prefill(1, 10)]).rows[0]
    assert (row.status, row.num_computed_tokens, row.num_cached_tokens, row.token_ids) == (OK, 50, 48, ids(model, prompt, 1))
    assert rounds.verifier.counts.num_cached_tokens == 48 + 16
    assert rounds.launch([prefill(2, 100)]).rows[0].token_ids == ids(model, PROMPT, 1)
    rounds.verifier.check_integrity()


def test_generated_tokens_enter_the_cache_and_rejected_ones_do_not(model, rounds):
    tokens = list(PROMPT)
    tokens += rounds.open(0, PROMPT).token_ids
    while len(tokens) < 40:
        wrong = [(ids(model, tokens, 1)[0] + 1) % 61] * 3
        tokens += rounds.launch([decode(0, tokens, wrong)]).rows[0].token_ids
    rounds.launch(closes=[SlotRef(0, 1)])
    again = rounds.open(0, tokens, epoch=2)
    assert again.num_cached_tokens == 32
    assert again.token_ids == ids(model, tokens, 1)


@pytest.mark.parametrize(("key", "num_cached"), [(b"a", 16), (b"b", 0), (b"", 0)])
def test_tenants_share_no_prefix(rounds, key, num_cached):
    prompt = list(range(20))
    rounds.open(0, prompt, tenant_cache_key=b"a")
    assert rounds.open(1, prompt, tenant_cache_key=key).num_cached_tokens == num_cached


# --- freshness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "epoch", "parent", "status"),
    [
        (0, 1, 1, OK),
        (0, 1, 0, STALE),  # the parent that Open would have
        (0, 1, 2, STALE),  # a round that has not been
        (0, 1, -1, STALE),
        (0, 0, 1, STALE),
        (0, 2, 1, STALE),
        (1, 1, 1, STALE),  # never opened
    ],
)
def test_freshness(model, rounds, slot, epoch, parent, status):
    tokens = PROMPT + rounds.open(0, PROMPT).token_ids
    row = rounds.launch([decode(slot, tokens, epoch=epoch, parent=parent)]).rows[0]
    assert row.status == status
    if status == STALE:
        assert row.token_ids == []
        assert rounds.launch([decode(0, tokens, parent=1)]).rows[0].token_ids == ids(model, tokens, 1)
    assert rounds.verifier.num_rows[STALE] == (status == STALE)


def test_a_closed_epoch_is_stale_and_its_close_is_ignored_later(rounds):
    rounds.open(0, PROMPT)
    rounds.launch(closes=[SlotRef(0, 1)], opens=[open_message(0, PROMPT, epoch=2)])
    assert rounds.launch([prefill(0, 9, parent=1)]).rows[0].status == STALE
    rounds.launch(closes=[SlotRef(0, 1), SlotRef(5, 1)])
    assert rounds.launch([prefill(0, 9, epoch=2)]).rows[0].status == OK
    assert rounds.verifier.num_open_slots == 1


def test_out_of_blocks_hits_one_row_makes_its_successor_stale_and_recovers(model, make):
    rounds = Rounds(make(model, num_blocks=4))
    long, short = list(range(40)), PROMPT
    rounds.open(0, long)  # 3 blocks
    tokens = short + rounds.open(1, short).token_ids  # the fourth
    free = rounds.verifier.num_free_blocks
    assert free == 0
    refused = rounds.launch([prefill(2, 99), decode(1, tokens)], opens=[open_message(2, [1] * 20)])
    assert [row.status for row in refused.rows] == [OUT_OF_BLOCKS, OK]
    assert (refused.rows[0].num_computed_tokens, refused.rows[0].token_ids) == (0, [])
    successor = rounds.launch([prefill(2, 99)]).rows[0]  # names the round that did not run
    assert successor.status == STALE
    recovered = rounds.launch([prefill(2, 99, parent=0)], closes=[SlotRef(0, 1)]).rows[0]
    assert (recovered.status, recovered.token_ids) == (OK, ids(model, [1] * 20, 1))


def test_a_decode_row_that_runs_out_of_blocks_can_come_again(model, make):
    rounds = Rounds(make(model, num_blocks=2, enable_prefix_cache=False))
    prompt = list(range(14))
    tokens = prompt + rounds.open(0, prompt).token_ids
    rounds.open(1, [3, 4])
    parent = rounds.parents[SlotRef(0, 1)]
    row = rounds.launch([decode(0, tokens, [1, 2, 3])]).rows[0]  # 15 + 3 tokens need a second block
    assert row.status == OUT_OF_BLOCKS
    assert rounds.launch([decode(0, tokens, [1, 2, 3])]).rows[0].status == STALE
    assert rounds.launch([decode(0, tokens, parent=parent)]).rows[0].token_ids == ids(model, tokens, 1)


# --- run-ahead ------------------------------------------------------------------------------------------------------


def test_from_round_chain_equals_one_by_one(model, rounds):
    truth = ids(model, PROMPT, 8)
    rounds.launch([prefill(0, 4)], opens=[open_message(0, PROMPT)])
    got = rounds.launch([prefill(0, 4)]).rows[0].token_ids
    for base_len in range(len(PROMPT) + 1, len(PROMPT) + 6):
        got += rounds.launch([ahead(0, base_len, rounds.round)]).rows[0].token_ids
    got += rounds.launch([decode(0, PROMPT + got, [truth[6]])]).rows[0].token_ids
    assert got[:8] == truth
    assert len(got) == 8


BAD_BIGRAM = GREEDY.replace(bad_words_token_ids=((1, 2),))


@pytest.mark.parametrize(
    ("case", "row", "match"),
    [
        ("all but one", ahead(0, 7, 1), "sampled no token"),
        ("prefilled", ahead(0, 8, 1), "from_round is 1, but the slot's last row ran in round 2"),
        ("prefilled", ahead(0, 9, 2), "base_len is 9, but the verifier's sequence has 8"),
        ("prefilled", ahead(0, 8, 2)._replace(draft_tokens=[1]), "1 drafts"),
        ("prefilled", ahead(0, 8, 2)._replace(first_token=4), "first_token 4"),
        ("drafted", ahead(0, 9, 3), "carried 1 drafts"),
        ("bad words", ahead(0, 8, 2), "bad words of several tokens"),
    ],
)
def test_from_round_is_refused_where_a_device_could_not_run_it(model, rounds, case, row, match):
    sampling = BAD_BIGRAM if case == "bad words" else GREEDY
    rounds.launch([prefill(0, 6)], opens=[open_message(0, PROMPT, sampling)])
    if case != "all but one":
        first = rounds.launch([prefill(0, 100)]).rows[0].token_ids
    if case == "drafted":
        wrong = (ids(model, PROMPT + first, 1)[0] + 1) % 61
        rounds.launch([decode(0, PROMPT + first, [wrong])])
    result = rounds.launch([row]).rows[0]
    assert result.status == BAD
    assert match in result.error


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_free_and_promised_blocks(model, make):
    rounds = Rounds(make(model, num_blocks=20, enable_prefix_cache=False))
    prompt = list(range(40))
    assert rounds.launch([prefill(0, 33)], opens=[open_message(0, prompt)]).free_blocks == 17
    tokens = prompt + rounds.launch([prefill(0, 99)]).rows[0].token_ids
    queued = [
        rounds.build([decode(0, tokens, [1] * 8), prefill(1, 30)], opens=[open_message(1, list(range(50)))]),  # 49 tokens: 1 more; 30: 2
        rounds.build([prefill(1, 30), VerifyRow(7, 1, 0, token_budget=99)]),  # all 50 tokens: 2 more; an unknown slot: none
    ]
    assert rounds.verifier.num_promised_blocks(queued) == 5
    free = rounds.verifier.num_free_blocks
    for message in queued:
        rounds.finish(rounds.verifier.launch(message))
    assert rounds.verifier.num_free_blocks == free - 5


def test_reset_closes_everything(rounds):
    for slot in range(4):
        rounds.open(slot, [slot] * 40)
    rounds.verifier.reset()
    rounds.verifier.check_integrity()
    assert (rounds.verifier.num_open_slots, rounds.verifier.num_free_blocks) == (0, rounds.verifier.num_blocks)
