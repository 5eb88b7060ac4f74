"""Whatever the rounds look like, every sequence's text and log-probabilities equal a one-token-a-step reference loop."""

import random
from collections import deque

import pytest
import torch

from specwire.messages import RowStatus, SlotRef
from tests.verifier.cases import NUM_TOKENS, SAMPLINGS, Case, check, draft, make_recipes
from tests.verifier.harness import Rounds, ahead, decode, prefill, tiny_model


@pytest.fixture(scope="module")
def cases_of():
    torch.set_num_threads(1)
    model = tiny_model(seed=5)
    recipes = make_recipes(model)
    return model, lambda: [Case(*recipe, slot=slot) for slot, recipe in enumerate(recipes)]


class Driver:
    """A coordinator that keeps up to `num_in_flight` rounds unread, runs ahead, drafts, preempts, and sends stale rows now and then."""

    def __init__(self, verifier, cases, generator, num_in_flight):
        self.rounds = Rounds(verifier)
        self.cases = cases
        self.generator = generator
        self.num_in_flight = num_in_flight
        self.in_flight = deque()
        self.victims = []
        self.seen = dict.fromkeys(RowStatus, 0)
        self.num_accepted = self.num_drafted = self.num_from_device = self.num_closed_in_flight = 0

    def run(self):
        while self.in_flight or not all(case.is_done for case in self.cases):
            may_launch = len(self.in_flight) < self.num_in_flight and not all(case.is_done for case in self.cases)
            if may_launch and (not self.in_flight or self.generator.random() < 0.7):
                self.launch()
            else:
                self.read()
        self.rounds.launch(closes=[SlotRef(case.slot, case.epoch) for case in self.cases if case.is_open])

    def launch(self):
        closes, opens, rows, owners = [], [], [], []
        for case in self.generator.sample(self.cases, len(self.cases)):
            if case.is_open and (case.is_done or case in self.victims or self.generator.random() < 0.03):
                closes.append(SlotRef(case.slot, case.epoch))
                case.is_open = False
                self.num_closed_in_flight += case.num_unread > 0
            if case.is_done or case in self.victims or self.generator.random() < 0.3:
                continue
            if not case.is_open:
                opens.append(case.reopen())
            row, is_certain = self.row(case)
            if row is None:
                continue
            is_stale = self.generator.random() < 0.05
            if is_stale:
                row = row._replace(parent_round=row.parent_round + 1000)
            else:
                case.sent(self.rounds.round + 1, row, is_certain=is_certain)
            rows.append(row)
            owners.append((case, case.epoch, is_certain, is_stale))
        self.victims = []
        launched = self.rounds.start(rows, opens=opens, closes=closes)
        self.num_from_device += sum(segment.from_device for segment in launched.segments)
        self.in_flight.append((launched, owners))

    def row(self, case):
        """The case's next row, None if it must wait; and whether it samples one token for certain."""
        slot, epoch = case.slot, case.epoch
        if case.has_failed:
            if case.num_unread:
                return None, False
            case.resume()
        may_run_ahead = not case.sampling.bad_words_token_ids and len(case.output) + case.num_ahead < NUM_TOKENS
        if case.num_ahead:
            row = ahead(slot, len(case.tokens) + case.num_ahead, case.parent, epoch=epoch, parent=case.parent) if may_run_ahead else None
            return row, True
        if not case.is_prefilled:
            budget = self.generator.choice((1, 4, 9, 100))
            return prefill(slot, budget, epoch=epoch, parent=case.parent), budget >= len(case.tokens) and not case.num_unread
        if case.num_unread:
            return None, False
        if may_run_ahead and not case.last_num_drafts and self.generator.random() < 0.4:
            return ahead(slot, len(case.tokens), case.parent, epoch=epoch, parent=case.parent), True
        drafts = draft(case, self.generator)
        return decode(slot, case.tokens, drafts, epoch=epoch, parent=case.parent), not drafts

    def read(self):
        launched, owners = self.in_flight.popleft()
        result = self.rounds.finish(launched)
        for (case, epoch, is_certain, is_stale), sent, row in zip(owners, launched.request.rows, result.rows, strict=True):
            self.seen[row.status] += 1
            assert row.status in (RowStatus.OK, RowStatus.STALE, RowStatus.OUT_OF_BLOCKS)
            if is_stale:
                assert row.status == RowStatus.STALE
            elif case.epoch == epoch:  # else it has been reopened without these tokens
                self.num_accepted += row.num_accepted
                self.num_drafted += len(sent.draft_tokens)
                case.answered(result.round, row, is_certain=is_certain)
                if row.status == RowStatus.OUT_OF_BLOCKS:  # preempt the newest
                    self.victims.append(max((c for c in self.cases if c.is_open), key=lambda c: c.slot, default=None))


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 200), (1, 200), (1, 14), (2, 14)])
def test_random_rounds_equal_the_reference(cases_of, seed, num_blocks, num_in_flight, make):
    model, make_cases = cases_of
    cases = make_cases()
    verifier = make(model, num_blocks=num_blocks, max_num_seqs=9, max_num_batched_tokens=1000, num_in_flight=num_in_flight)
    driver = Driver(verifier, cases, random.Random(seed), num_in_flight)
    driver.run()
    assert sum(map(check, cases)) <= 1
    assert 0 < driver.num_accepted < driver.num_drafted
    assert driver.seen[RowStatus.STALE] > 0
    assert (driver.seen[RowStatus.OUT_OF_BLOCKS] > 0) == (num_blocks == 14)
    assert (driver.num_closed_in_flight > 0) == (num_in_flight > 1)
    assert (driver.num_from_device > 0) == (num_in_flight > 1 and make.keywords["executor"] == "rounds")
    assert verifier.counts.num_cached_tokens > 0
    assert verifier.num_free_blocks == num_blocks


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("num_drafts", [1, 8])
def test_right_drafts_are_all_accepted(cases_of, name, num_drafts, make):
    model, make_cases = cases_of
    case = make_cases()[list(SAMPLINGS).index(name)]
    rounds = Rounds(make(model))
    truth = [token_id for token_id, _, _ in case.truth]
    first = rounds.open(case.slot, case.prompt, case.sampling, noise_key=case.key, choice=case.choice)
    case.output, case.logprobs = list(first.token_ids), list(first.logprobs or [])
    while not case.is_done:
        drafts = truth[len(case.output) : len(case.output) + num_drafts]
        row = rounds.launch([decode(case.slot, case.tokens, drafts)]).rows[0]
        assert row.num_accepted == num_drafts
        case.output += row.token_ids
        case.logprobs += row.logprobs or []
    assert check(case) == 0
