"""Rounds on a verifier in process: freshness, prefill, run-ahead, bad rows, blocks."""

import pytest
import torch

from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.messages import ConditionalOutcome, LogitOverlay, Proposals, RowStatus, SlotRef, VerifyRow
from specwire.sampling_params import SamplingParams
from tests.verifier.harness import GREEDY, Rounds, ahead, decode, make_verifier, open_message, poison, prefill, reference, tiny_model

OK, STALE, OUT_OF_BLOCKS, BAD = RowStatus.OK, RowStatus.STALE, RowStatus.OUT_OF_BLOCKS, RowStatus.BAD
PROMPT = [5, 17, 33, 8, 21, 40, 9]


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_model()


@pytest.fixture
def rounds(model):
    return Rounds(make_verifier(model))


def ids(model, prompt, num_tokens, sampling=GREEDY, **key):
    return [token_id for token_id, _, _ in reference(model, prompt, num_tokens, sampling, **key)]


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


def test_out_of_blocks_hits_one_row_makes_its_successor_stale_and_recovers(model):
    rounds = Rounds(make_verifier(model, num_blocks=4))
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


def test_a_decode_row_that_runs_out_of_blocks_can_come_again(model):
    rounds = Rounds(make_verifier(model, num_blocks=2, enable_prefix_cache=False))
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


# --- bad rows -------------------------------------------------------------------------------------------------------

TOKENS = [*PROMPT, 0]  # the last one is replaced by the sampled token

BAD_ROWS = {
    "draft id -1": (decode(0, TOKENS, [3, -1]), "draft_tokens[1] is -1, but the model's ids are 0 to 60"),
    "draft id = vocab_size": (decode(0, TOKENS, [61]), "draft_tokens[0] is 61"),
    "too many drafts": (decode(0, TOKENS, [3] * 9), "9 drafts, but num_speculative_tokens is 8"),
    "base_len too small": (decode(0, TOKENS)._replace(base_len=7), "base_len is 7, but the verifier's sequence has 8 tokens"),
    "base_len too large": (decode(0, TOKENS)._replace(base_len=9), "base_len is 9"),
    "base_len 0": (decode(0, TOKENS)._replace(base_len=0), "base_len is 0"),
    "first token -1": (decode(0, TOKENS)._replace(first_token=-1), "first_token is -1, but the verifier's token 7 is"),
    "first token = vocab_size": (decode(0, TOKENS)._replace(first_token=61), "first_token is 61"),
    "negative budget": (prefill(0, -4), "token_budget is -4"),
    "prefill with drafts": (prefill(0, 4)._replace(draft_tokens=[1]), "1 drafts; it must have 0, -1, 0 and none"),
    "prefill with base_len": (prefill(0, 4)._replace(base_len=8), "has base_len 8"),
    "round too large": (prefill(0, 257), "258 tokens, but max_num_batched_tokens is 256"),
    "past max_model_len": (None, "11 tokens, 3 drafts and the next token pass max_model_len = 14"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_ends_its_sequence_alone(model, name):
    row, message = BAD_ROWS[name]
    rounds = Rounds(make_verifier(model, max_model_len=14 if row is None else 256))
    tokens = PROMPT + rounds.open(0, PROMPT).token_ids
    other = [4, 4, 9]
    other += rounds.open(1, other).token_ids
    if row is None:
        tokens += rounds.launch([decode(0, tokens, ids(model, tokens, 2))]).rows[0].token_ids
        row = decode(0, tokens, [1, 2, 3])
    elif row.base_len == 8 and row.first_token == 0:
        row = row._replace(first_token=tokens[-1])
    result = rounds.launch([decode(1, other), row])
    assert [r.status for r in result.rows] == [OK, BAD]
    assert message in result.rows[1].error
    assert (result.rows[0].token_ids, result.rows[1].token_ids) == (ids(model, other, 1), [])
    later = rounds.launch([decode(0, tokens)]).rows[0]
    assert (later.status, later.error) == (BAD, result.rows[1].error)
    rounds.launch(closes=[SlotRef(0, 1), SlotRef(1, 1)])
    assert rounds.verifier.num_free_blocks == rounds.verifier.num_blocks
    assert rounds.open(0, PROMPT, epoch=2).token_ids == ids(model, PROMPT, 1)


def test_decoding_before_the_prefill_is_done_is_bad(rounds):
    rounds.launch([prefill(0, 3)], opens=[open_message(0, PROMPT)])
    row = rounds.launch([decode(0, PROMPT)]).rows[0]
    assert row.status == BAD
    assert "only 3 are computed" in row.error


def test_two_rows_of_a_slot_in_a_round(model, rounds):
    tokens = PROMPT + rounds.open(0, PROMPT).token_ids
    row = decode(0, tokens, parent=1)
    result = rounds.launch([row, row])
    assert [r.status for r in result.rows] == [OK, BAD]
    assert result.rows[0].token_ids == ids(model, tokens, 1)
    assert "two rows in round 2" in result.rows[1].error


def test_overlays_are_refused_by_name(rounds):
    tokens = PROMPT + rounds.open(0, PROMPT).token_ids
    row = rounds.launch([decode(0, tokens)], overlays=[LogitOverlay(0, 0, [3])]).rows[0]
    assert row.status == BAD
    assert "logit overlay (grammar)" in row.error


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"proposals": Proposals(1, [], [])}, "ratio test"), ({"conditional": [[ConditionalOutcome(0, 1, [], [])]]}, "conditional drafts")],
)
def test_later_features_are_refused_by_name(rounds, fields, match):
    tokens = PROMPT + rounds.open(0, PROMPT).token_ids
    with pytest.raises(UnsupportedError, match=match):
        rounds.launch([decode(0, tokens)], **fields)
    assert rounds.launch([decode(0, tokens, parent=1)]).rows[0].status == OK  # nothing was changed


BAD_OPENS = {
    "id -1": ({"token_ids": [1, -1]}, "token_ids[1] is -1, but the model's ids are 0 to 60"),
    "id = vocab_size": ({"token_ids": [61]}, "token_ids[0] is 61"),
    "no tokens": ({"token_ids": [], "num_prompt_tokens": 0}, "num_prompt_tokens is 0 with 0 token ids"),
    "prompt longer than all": ({"num_prompt_tokens": 8}, "num_prompt_tokens is 8 with 7 token ids"),
    "variant": ({"variant": "blue"}, "variant 'blue' is not served"),
    "rates under strict": ({"synthetic_acceptance_rates": (0.5,) * 8}, "rejection_sample_method is strict"),
    "eos id": ({"eos_token_ids": (99,)}, "eos_token_ids[0] is 99"),
    "stop id": ({"sampling": GREEDY.replace(stop_token_ids=(61,))}, "stop_token_ids names token id 61"),
    "nothing to sample": ({"sampling": GREEDY.replace(allowed_token_ids=(EOS_ID := 2,), min_tokens=3)}, "no token is left to sample"),
}


@pytest.mark.parametrize("name", BAD_OPENS)
def test_a_bad_open_ends_its_request_alone(model, rounds, name):
    fields, message = BAD_OPENS[name]
    values = {"token_ids": PROMPT} | fields
    bad = open_message(0, values.pop("token_ids"), **values)
    result = rounds.launch([prefill(0, 9), prefill(1, 9)], opens=[bad, open_message(1, PROMPT)])
    assert [row.status for row in result.rows] == [BAD, OK]
    assert message in result.rows[0].error
    assert result.rows[1].token_ids == ids(model, PROMPT, 1)
    rounds.launch(closes=[SlotRef(0, 1)])
    assert rounds.open(0, PROMPT, epoch=2).status == OK


@pytest.mark.parametrize(("num_extra", "status"), [(-1, OK), (0, BAD), (1, BAD)])
def test_prompts_around_max_model_len(model, num_extra, status):
    rounds = Rounds(make_verifier(model, max_model_len=32))
    prompt = [i % 61 for i in range(32 + num_extra)]
    row = rounds.open(0, prompt)
    assert row.status == status
    if status == OK:
        assert row.token_ids == ids(model, prompt, 1)  # the sequence is 32 tokens long now, and full
        full = rounds.launch([decode(0, prompt + row.token_ids)]).rows[0]
        assert "pass max_model_len = 32" in full.error
    else:
        assert f"the sequence has {len(prompt)} tokens, but max_model_len is 32" in row.error


@pytest.mark.parametrize(
    ("opens", "match"),
    [
        ([open_message(0, PROMPT, epoch=2)], "slot 0 is open"),
        ([open_message(i, PROMPT) for i in range(1, 9)], "9 slots would be open, but max_num_seqs is 8"),
    ],
)
def test_opens_that_break_the_protocol_change_nothing(rounds, opens, match):
    tokens = PROMPT + rounds.open(0, PROMPT).token_ids
    with pytest.raises(InvalidArgumentError, match=match):
        rounds.launch(opens=opens)
    assert rounds.launch([decode(0, tokens, parent=1)]).rows[0].status == OK


def test_a_slot_can_be_closed_and_opened_in_one_round(rounds):
    rounds.open(0, PROMPT)
    result = rounds.launch([prefill(0, 9, epoch=2)], closes=[SlotRef(0, 1)], opens=[open_message(0, PROMPT, epoch=2)])
    assert result.rows[0].status == OK


# --- bad numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["last prompt token", "chunk without output", "decode", "accepted draft"])
def test_nan_ends_only_its_own_sequence(where):
    model = tiny_model(seed=3)
    truth = ids(model, PROMPT, 4)
    poisoned = next(i for i in range(61) if i not in PROMPT + truth)
    if where in ("decode", "accepted draft"):
        poisoned = truth[1 if where == "accepted draft" else 0]
    others = [[i, i + 1, i + 2] for i in range(0, 60, 7) if poisoned not in (i, i + 1, i + 2)][:3]
    expected = {}
    for slot, other in enumerate(others, start=1):
        tail = ids(model, other, 4)
        expected[slot] = tail[: tail.index(poisoned)] if poisoned in tail else tail
    poison(model, poisoned)
    rounds = Rounds(make_verifier(model, num_blocks=12))

    got = {slot: rounds.open(slot, other).token_ids for slot, other in enumerate(others, start=1)}
    prompt = [*PROMPT, poisoned] if where in ("last prompt token", "chunk without output") else PROMPT
    bad = rounds.launch([prefill(0, 8)], opens=[open_message(0, [*prompt, 1, 2] if where == "chunk without output" else prompt)]).rows[0]
    tokens = PROMPT + truth[:1]
    for step in range(3):
        rows = {slot: decode(slot, others[slot - 1] + got[slot]) for slot in got if len(got[slot]) < len(expected[slot])}
        if step == 0 and where in ("decode", "accepted draft"):
            assert bad.status == OK
            rows[0] = decode(0, tokens, truth[1:2] if where == "accepted draft" else [])
        results = dict(zip(rows, rounds.launch(list(rows.values())).rows, strict=True))
        bad = results.pop(0, bad)
        for slot, row in results.items():
            assert row.status == OK
            got[slot] += row.token_ids
    assert bad.status == BAD
    assert "NaN or infinite" in bad.error
    assert bad.token_ids == []
    for slot, tail in expected.items():
        assert got[slot][: len(tail)] == tail
    # The next owner of the bad blocks is not harmed.
    rounds.launch(closes=[SlotRef(slot, 1) for slot in range(4)])
    assert rounds.verifier.num_free_blocks == 12
    healthy = [i for i in range(60) if i != poisoned][:40] * 4
    assert rounds.open(0, healthy, epoch=2).status == OK


def test_blocks_gone_bad_leave_the_prefix_cache():
    model = tiny_model()
    rounds = Rounds(make_verifier(model))
    prompt = [i % 61 for i in range(40)]
    tokens = prompt + rounds.open(0, prompt).token_ids
    first_block = rounds.verifier._blocks.block_table(0)[0]
    rounds.verifier._runner.kv_cache.layers[1][first_block] = float("nan")  # a memory fault, say
    assert rounds.launch([decode(0, tokens)]).rows[0].status == BAD
    again = rounds.launch([prefill(0, 99, epoch=2)], closes=[SlotRef(0, 1)], opens=[open_message(0, prompt, epoch=2)]).rows[0]
    assert (again.status, again.num_cached_tokens, again.token_ids) == (OK, 0, tokens[-1:])


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_free_and_promised_blocks(model):
    rounds = Rounds(make_verifier(model, num_blocks=20, enable_prefix_cache=False))
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
        rounds.verifier.launch(message)
    assert rounds.verifier.num_free_blocks == free - 5


def test_reset_closes_everything(rounds):
    for slot in range(4):
        rounds.open(slot, [slot] * 40)
    rounds.verifier.reset()
    rounds.verifier.check_integrity()
    assert (rounds.verifier.num_open_slots, rounds.verifier.num_free_blocks) == (0, rounds.verifier.num_blocks)
