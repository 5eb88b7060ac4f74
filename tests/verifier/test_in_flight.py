"""Rounds that are launched before those ahead of them are read: whatever they are, answers are as if rounds ran one by one."""

import random
from collections import Counter, deque

import pytest
import torch

from specwire.messages import LogitOverlay, RowStatus, SlotRef, VerifyRow
from tests.verifier.cases import make_recipes
from tests.verifier.harness import PROMPT, Rounds, ahead, decode, ids, open_message, poison, prefill, tiny_model

OK, STALE, OUT_OF_BLOCKS, BAD = RowStatus.OK, RowStatus.STALE, RowStatus.OUT_OF_BLOCKS, RowStatus.BAD
POISON = 60


@pytest.fixture(scope="module")
def recipes():
    """Of the cases of one model."""
    torch.set_num_threads(1)
    return make_recipes(tiny_model(seed=5))


# --- one verifier that keeps rounds in flight, one that does not: equal answers to equal rounds -----------------------


def numbers(rows):
    """All log-probabilities of an answer, in order."""
    return [number for row in rows for each in row.logprobs or () for number in (each.sampled, *[number for _, number in each.top])]


def without_numbers(rows):
    """Its rows, and of which tokens there are any."""
    tokens = [None if row.logprobs is None else [[token for token, _ in each.top] for each in row.logprobs] for row in rows]
    return [row._replace(logprobs=None) for row in rows], tokens


class Twins:
    """Sends random rounds to both, legal or not; rows are made from what the one without rounds in flight knows."""

    def __init__(self, make, model, recipes, seed, num_in_flight, num_blocks):
        limits = {
            "num_blocks": num_blocks, "max_num_seqs": 9, "max_num_batched_tokens": 1000, "max_model_len": 100, "enable_prefix_cache": False
        }  # fmt: skip
        self.ahead = Rounds(make(model, num_in_flight=num_in_flight, **limits))
        self.plain = make(model, **limits)
        self.recipes = recipes
        self.generator = random.Random(seed)
        self.num_in_flight = num_in_flight
        self.in_flight = deque()
        self.epoch = 0
        self.seen = Counter()

    def run(self, num_rounds):
        for _ in range(num_rounds):
            while len(self.in_flight) == self.num_in_flight or (self.in_flight and self.generator.random() < 0.2):
                self.read()
            self.launch()
        while self.in_flight:
            self.read()
        for verifier in (self.ahead.verifier, self.plain):
            verifier.reset()
            verifier.check_integrity()
            assert verifier.num_free_blocks == verifier.num_blocks

    def launch(self):
        chance = self.generator.random
        closes, opens, rows = [], [], []
        for number in self.generator.sample(range(len(self.recipes)), len(self.recipes)):
            slot = self.plain._slots.get(number)
            if slot is not None and chance() < (0.3 if slot.error or len(slot.token_ids) > 70 else 0.04):
                closes.append(SlotRef(number, slot.epoch))
                self.seen["closed in flight"] += self.ahead.verifier._slots[number].num_unread_rows > 0
                slot = None
            if chance() < 0.2:
                continue
            if slot is None:
                opens.append(self.open(number))
                rows.append(prefill(number, self.generator.choice((1, 4, 9, 100)), epoch=self.epoch, parent=0))
            else:
                rows += self.rows(slot)
        overlays = [LogitOverlay(0, 0, [3])] if chance() < 0.02 else []
        message = self.ahead.build(rows, opens=opens, closes=closes, overlays=overlays)
        launched = self.ahead.verifier.launch(message)
        self.ahead.verifier.check_integrity()
        self.seen["from device"] += sum(segment.from_device for segment in launched.segments)
        self.in_flight.append((launched, self.plain.finish(self.plain.launch(message))))
        self.plain.check_integrity()

    def read(self):
        launched, expected = self.in_flight.popleft()
        answer = self.ahead.finish(launched)
        assert without_numbers(answer.rows) == without_numbers(expected.rows)
        assert numbers(answer.rows) == pytest.approx(numbers(expected.rows), abs=1e-5), "passes with other rows beside may sum in another order"
        assert answer.round == expected.round
        for row in answer.rows:
            self.seen[row.status] += 1
            self.seen["accepted"] += row.num_accepted
            self.seen["NaN"] += "NaN" in row.error

    def open(self, number):
        self.epoch += 1
        prompt, sampling, key, choice, truth = self.recipes[number]
        tokens = prompt + [token for token, _, _ in truth[: self.generator.randrange(4)]]
        if self.generator.random() < 0.1:
            tokens[self.generator.randrange(len(tokens))] = POISON
        fields = {"num_prompt_tokens": len(prompt), "noise_key": key, "choice": choice}
        if self.generator.random() < 0.05:
            tokens[-1] = 999
        return open_message(number, tokens, sampling, epoch=self.epoch, **fields)

    def rows(self, slot):
        """Mostly one row that may run; else stale, bad, twice, or in need of what is not read."""
        row = self.row(slot)._replace(parent_round=slot.last_round)
        kind = self.generator.random()
        if kind < 0.03:
            return [row._replace(parent_round=row.parent_round + 1)]
        if kind < 0.035:
            return [row._replace(base_len=row.base_len + 1)]
        if kind < 0.04:
            return [row._replace(draft_tokens=[999])]
        if kind < 0.045:
            return [row, row]
        if kind < 0.05:
            return [ahead(slot.slot, len(slot.token_ids), slot.last_round, epoch=slot.epoch, parent=slot.last_round)]
        return [row]

    def row(self, slot) -> VerifyRow:
        prompt, _, _, _, truth = self.recipes[slot.slot]
        if not slot.token_ids or slot.num_computed_tokens < slot.num_opened_tokens or self.generator.random() < 0.03:
            return prefill(slot.slot, self.generator.choice((1, 4, 9, 100)), epoch=slot.epoch)
        drafts = [token for token, _, _ in truth[len(slot.token_ids) - len(prompt) :]][: self.generator.choice((0, 0, 0, 0, 1, 3, 8))]
        if drafts and self.generator.random() < 0.3:
            drafts[-1] = self.generator.choice((5, POISON))
        can_follow = slot.last_num_drafts == 0 and slot.num_computed_tokens >= slot.num_opened_tokens and slot.sampling.params.runs_ahead
        if not drafts and can_follow and self.generator.random() < 0.9:
            return ahead(slot.slot, len(slot.token_ids), slot.last_round, epoch=slot.epoch)
        return decode(slot.slot, slot.token_ids, drafts, epoch=slot.epoch)


@pytest.mark.parametrize(("num_in_flight", "seed"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("lacks", ["blocks", "good numbers"])
def test_any_rounds_are_answered_as_if_they_ran_one_by_one(make, recipes, num_in_flight, seed, lacks):
    # Not both at once: until it is read, a slot that went bad takes blocks that it would not get if that were known.
    model = tiny_model(seed=5)
    if lacks == "good numbers":
        poison(model, POISON)
    twins = Twins(make, model, recipes, seed, num_in_flight, 18 if lacks == "blocks" else 100)
    twins.run(60)
    assert all(twins.seen[what] > 3 for what in (OK, STALE, BAD, "accepted")), twins.seen
    assert (twins.seen[OUT_OF_BLOCKS] > 3, twins.seen["NaN"] > 3) == (lacks == "blocks", lacks == "good numbers"), twins.seen
    assert twins.seen["closed in flight"] > 0, twins.seen
    assert twins.ahead.verifier.num_waits > 3
    assert (twins.seen["from device"] > 10) == (make.keywords["executor"] == "rounds"), twins.seen


# --- one by one -----------------------------------------------------------------------------------------------------


def test_a_closed_slots_blocks_go_to_another_while_its_round_is_in_flight(model, make, truth):
    rounds = Rounds(make(model, num_blocks=2))
    rounds.open(0, PROMPT)
    first = rounds.start([ahead(0, len(PROMPT) + 1, rounds.round)])
    other = list(range(20, 50))  # needs both blocks
    second = rounds.start([prefill(1, 99)], closes=[SlotRef(0, 1)], opens=[open_message(1, other)])
    assert rounds.verifier.num_open_slots == 1
    late, row = rounds.finish(first).rows[0], rounds.finish(second).rows[0]
    assert (late.status, late.token_ids, late.num_computed_tokens) == (OK, truth[1:2], len(PROMPT) + 1)
    assert (row.status, row.token_ids) == (OK, ids(model, other, 1))
    assert rounds.launch([decode(1, other + row.token_ids)]).rows[0].token_ids == ids(model, other + row.token_ids, 1)


def test_what_a_closed_slot_had_in_flight_does_not_enter_the_prefix_cache(model, make):
    rounds = Rounds(make(model))
    prompt = [i % 50 for i in range(40)]
    first = rounds.start([prefill(0, 20)], opens=[open_message(0, prompt)])
    rounds.finish(first)
    second = rounds.start([prefill(0, 20)])
    rounds.start(closes=[SlotRef(0, 1)])
    assert rounds.finish(second).rows[0].token_ids == ids(model, prompt, 1)
    again = rounds.open(1, prompt)
    assert (again.num_cached_tokens, again.token_ids) == (16, ids(model, prompt, 1))


def test_blocks_that_turn_out_bad_after_the_close_leave_the_prefix_cache(make):
    model = tiny_model()
    rounds = Rounds(make(model))
    prompt = [i % 50 for i in range(40)]
    rounds.open(0, prompt)
    first_block = rounds.verifier._blocks.block_table(0)[0]
    rounds.verifier._executor.kv_cache.layers[1][first_block] = float("nan")  # a memory fault, say
    bad = rounds.start([ahead(0, 41, rounds.round)])
    rounds.start(closes=[SlotRef(0, 1)])
    assert rounds.finish(bad).rows[0].status == BAD
    again = rounds.open(1, prompt)
    assert (again.status, again.num_cached_tokens, again.token_ids) == (OK, 0, ids(model, prompt, 1))


def test_rows_behind_one_that_goes_bad_are_bad_with_its_error(make):
    model = tiny_model()
    poison(model, POISON)
    rounds = Rounds(make(model, num_in_flight=3))
    prompt = [3, POISON, 5]
    opens = [open_message(0, prompt), open_message(1, PROMPT)]
    launched = [rounds.start([prefill(0, 9), prefill(1, 9)], opens=opens)]
    for number in (1, 2):
        launched.append(rounds.start([ahead(0, 3 + number, rounds.round), ahead(1, len(PROMPT) + number, rounds.round)]))
    answers = [rounds.finish(each).rows for each in launched]
    assert [bad.status for bad, _ in answers] == [BAD] * 3
    assert {(bad.error, bad.num_computed_tokens) for bad, _ in answers} == {(answers[0][0].error, 0)}
    assert [good.token_ids[0] for _, good in answers] == ids(model, PROMPT, 3)


def test_out_of_blocks_in_flight_makes_the_rows_behind_it_stale(model, make, truth):
    rounds = Rounds(make(model, num_blocks=2, enable_prefix_cache=False))
    prompt = PROMPT + truth[:8]
    opens = [open_message(0, prompt), open_message(1, [3, 4])]
    tokens = prompt + rounds.launch([prefill(0, 99), prefill(1, 99)], opens=opens).rows[0].token_ids
    launched = [rounds.start([ahead(0, 16 + number, rounds.round), ahead(1, 3 + number, rounds.round)]) for number in range(2)]
    rows = [[row.status for row in rounds.finish(each).rows] for each in launched]
    assert rows == [[OK, OK], [OUT_OF_BLOCKS, OK]]
    behind = rounds.launch([ahead(0, 18, rounds.round), ahead(1, 5, rounds.round)])
    assert [row.status for row in behind.rows] == [STALE, OK]
    tokens += ids(model, tokens, 1)
    recovered = rounds.launch([decode(0, tokens, parent=2)], closes=[SlotRef(1, 1)]).rows[0]
    assert (recovered.status, recovered.token_ids) == (OK, ids(model, tokens, 1))


def test_a_round_that_could_not_start_moves_no_slot(model, make, truth, monkeypatch):
    rounds = Rounds(make(model))
    rounds.open(0, PROMPT)
    with monkeypatch.context() as broken:
        broken.setattr(rounds.verifier._executor, "launch", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            rounds.start([ahead(0, len(PROMPT) + 1, rounds.round)])
    assert rounds.launch([ahead(0, len(PROMPT) + 2, rounds.round)]).rows[0].status == STALE
    assert rounds.launch([ahead(0, len(PROMPT) + 1, 1, parent=1)]).rows[0].token_ids == truth[1:2]


def fail(*_):
    raise RuntimeError("device lost")


@pytest.mark.parametrize(("results", "error", "message"), [(fail, RuntimeError, "device lost"), (list, AssertionError, "1 segments, 0 came out")])
def test_a_round_that_failed_in_flight_ends_its_sequences_and_no_others(model, make, truth, results, error, message):
    rounds = Rounds(make(model, num_in_flight=3))
    rounds.open(0, [*PROMPT, *truth[:8]])
    first = rounds.start([ahead(0, 16, rounds.round)])
    first.pending.results = results
    second = rounds.start([ahead(0, 17, rounds.round), prefill(1, 9)], opens=[open_message(1, PROMPT)])
    with pytest.raises(error, match=message):
        rounds.finish(first)
    behind, other = rounds.finish(second).rows
    assert (behind.status, behind.error) == (BAD, f"round 2 failed with {error.__name__}; reopen the sequence")
    assert other.token_ids == truth[:1]
    rounds.launch(closes=[SlotRef(0, 1), SlotRef(1, 1)])
    assert rounds.open(2, [*PROMPT, *truth[:9]]).num_cached_tokens == 0


def test_resetting_waits_for_what_is_in_flight(model, make, truth):
    rounds = Rounds(make(model))
    launched = [rounds.start([prefill(0, 4)], opens=[open_message(0, PROMPT)]), rounds.start([prefill(0, 4)])]
    rounds.verifier.reset()
    rounds.verifier.check_integrity()
    assert (rounds.verifier.num_unread_rounds, rounds.verifier.num_free_blocks) == (0, rounds.verifier.num_blocks)
    assert [rounds.finish(each).rows[0].token_ids for each in launched] == [[], truth[:1]]
