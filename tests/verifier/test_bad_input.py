"""Bad rows, bad opens and bad numbers end their own sequence and nothing else."""

import pytest

from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.messages import ConditionalOutcome, LogitOverlay, Proposals, RowStatus, SlotRef
from tests.verifier.harness import GREEDY, PROMPT, Rounds, decode, ids, make_verifier, open_message, poison, prefill, tiny_model

OK, STALE, OUT_OF_BLOCKS, BAD = RowStatus.OK, RowStatus.STALE, RowStatus.OUT_OF_BLOCKS, RowStatus.BAD


TOKENS = [*PROMPT, 0]  # the last one is replaced by the sampled token

BAD_ROWS = {
    "draft id -1": (decode(0, TOKENS, [3, -1]), "draft_tokens[1] is -1, but the model's ids are 0 to 60"),
    "draft id = vocab_size": (decode(0, TOKENS, [61]), "draft_tokens[0] is 61"),
    "too many drafts": (decode(0, TOKENS, [3] * 9), "9 drafts, but num_speculative_tokens is 8"),
    "base_len too small": (decode(0, TOKENS)._replace(base_len=7), "base_len is 7, but the verifier's sequence has 8 tokens"),
    "base_len too large": (decode(0, TOKENS)._replace(base_len=9), "base_len is 9"),
    "base_len 0": (decode(0, TOKENS)._replace(base_len=0), "base_len is 0"),
    "first token -1": (decode(0, TOKENS)._replace(first_token=-1), "first_token is not the verifier's token 7"),
    "first token = vocab_size": (decode(0, TOKENS)._replace(first_token=61), "first_token is not the verifier's token 7"),
    "negative budget": (prefill(0, -4), "token_budget is -4"),
    "prefill with drafts": (prefill(0, 4)._replace(draft_tokens=[1]), "1 drafts; it must have 0, -1, 0 and none"),
    "prefill with base_len": (prefill(0, 4)._replace(base_len=8), "has base_len 8"),
    "round too large": (prefill(0, 257), "258 tokens, but max_num_batched_tokens is 256"),
    "past max_model_len": (None, "11 tokens, 3 drafts and the next token pass max_model_len = 14"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_ends_its_sequence_alone(model, name, make):
    row, message = BAD_ROWS[name]
    rounds = Rounds(make(model, max_model_len=14 if row is None else 256))
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


WRONG_PROPOSALS = {
    "id": (Proposals(2, [3, 61, 4, 4], [0.5, 0.5, 1.0, 0.0]), "outside of the vocabulary, 0 to 60"),
    "sum": (Proposals(2, [3, 5, 4, 4], [0.5, 0.4, 1.0, 0.0]), "whose sum is 1"),
    "nan": (Proposals(2, [3, 5, 4, 4], [float("nan"), 0.5, 1.0, 0.0]), "whose sum is 1"),
    "negative": (Proposals(2, [3, 5, 4, 4], [1.5, -0.5, 1.0, 0.0]), "whose sum is 1"),
    "another draft": (Proposals(2, [9, 5, 4, 4], [0.5, 0.5, 1.0, 0.0]), "none of the candidates"),
    "no chance": (Proposals(2, [3, 5, 4, 4], [0.0, 1.0, 1.0, 0.0]), "none of the candidates"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PROPOSALS)
def test_drafts_that_were_not_drawn_so(model, name):
    proposals, message = WRONG_PROPOSALS[name]
    rounds = Rounds(make_verifier(model, tests_ratio=True))
    texts = [PROMPT + rounds.open(slot, PROMPT, GREEDY.replace(temperature=1.0)).token_ids for slot in range(2)]
    result = rounds.launch([decode(0, texts[0], [3]), decode(1, texts[1], [4])], proposals=proposals)
    assert [row.status for row in result.rows] == [BAD, OK]
    assert message in result.rows[0].error
    assert rounds.launch([decode(1, texts[1] + result.rows[1].token_ids)]).rows[0].status == OK


@pytest.mark.parametrize(
    ("proposals", "message"),
    [(Proposals(0, [], []), "0 candidates"), (Proposals(33, [3] * 33, [0.0] * 33), "1 to 32"), (Proposals(1, [3, 4], [1.0, 1.0]), "1 drafts")],
)
def test_proposals_of_other_lengths_change_nothing(model, proposals, message):
    rounds = Rounds(make_verifier(model, tests_ratio=True))
    tokens = PROMPT + rounds.open(0, PROMPT).token_ids
    with pytest.raises(InvalidArgumentError, match=message):
        rounds.launch([decode(0, tokens, [3])], proposals=proposals)
    assert rounds.launch([decode(0, tokens, parent=1)]).rows[0].status == OK


BAD_OPENS = {
    "id -1": ({"token_ids": [1, -1]}, "token_ids[1] is -1, but the model's ids are 0 to 60"),
    "id = vocab_size": ({"token_ids": [61]}, "token_ids[0] is 61"),
    "no tokens": ({"token_ids": [], "num_prompt_tokens": 0}, "num_prompt_tokens is 0 with 0 token ids"),
    "prompt longer than all": ({"num_prompt_tokens": 8}, "num_prompt_tokens is 8 with 7 token ids"),
    "variant": ({"variant": "blue"}, "variant 'blue' is not served"),
    "rates under strict": ({"synthetic_acceptance_rates": (0.5,) * 8}, "rejection_sample_method is strict"),
    "eos id": ({"eos_token_ids": (99,)}, "eos_token_ids[0] is 99"),
    "choice": ({"choice": 2**31}, "choice is 2147483648, but must be from 0 to 2147483647"),
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
def test_prompts_around_max_model_len(model, num_extra, status, make):
    rounds = Rounds(make(model, max_model_len=32))
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
def test_nan_ends_only_its_own_sequence(where, make):
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
    rounds = Rounds(make(model, num_blocks=12))

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


def test_blocks_gone_bad_leave_the_prefix_cache(make):
    model = tiny_model()
    rounds = Rounds(make(model))
    prompt = [i % 61 for i in range(40)]
    tokens = prompt + rounds.open(0, prompt).token_ids
    first_block = rounds.verifier._blocks.block_table(0)[0]
    rounds.verifier._executor.kv_cache.layers[1][first_block] = float("nan")  # a memory fault, say
    assert rounds.launch([decode(0, tokens)]).rows[0].status == BAD
    again = rounds.launch([prefill(0, 99, epoch=2)], closes=[SlotRef(0, 1)], opens=[open_message(0, prompt, epoch=2)]).rows[0]
    assert (again.status, again.num_cached_tokens, again.token_ids) == (OK, 0, tokens[-1:])
