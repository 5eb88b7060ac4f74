"""A model and look-ups side by side: whose draft is taken, when the model is not asked, and that it keeps its place in the text."""

import dataclasses
from collections.abc import Sequence

import pytest

from drafter_svc.draft_model import DraftModel
from drafter_svc.method import MEASUREMENT_TENANT, Ask, Drafts
from drafter_svc.model_and_lookups import ModelAndLookups
from drafter_svc.ngram import Ngram
from drafter_svc.suffix import Suffix
from drafter_svc.suffix_match import Limits
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams
from tests.drafter.draft_models import GREEDY, SAMPLED, Make
from tests.drafter.helpers import ScriptedMethod, open_request

PERIOD = [11, 12, 13, 14, 15]


def periodic(start: int, end: int) -> list[int]:
    return [PERIOD[i % len(PERIOD)] for i in range(start, end)]


class Scored(ScriptedMethod):
    """A method that drafts one token again and again, with one score; or answers with a status and nothing else.

    with_text: drafts `periodic` tokens instead, as they go on.
    """

    def __init__(self, token_id: int = 0, score: float = 0.5, *, with_text: bool = False, name: str = "model") -> None:
        super().__init__(lambda tokens, k: periodic(len(tokens), len(tokens) + k) if with_text else [token_id] * k)
        self.score, self.status = score, RowStatus.OK
        self._description = dataclasses.replace(self._description, method=name)

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        drafts = super().propose(asks)
        if self.status is not RowStatus.OK:
            return [Drafts(self.status)] * len(drafts)
        return [run._replace(scores=[self.score] * len(run.token_ids)) for run in drafts]


def look_up(token_id: int = 0, score: float = 0.5, *, with_text: bool = False) -> Scored:
    return Scored(token_id, score, with_text=with_text, name="lookup")


def both(lookup: ScriptedMethod, model: ScriptedMethod) -> ModelAndLookups:
    return ModelAndLookups([lookup], model, ["lookup", "model"])


def run(method: ModelAndLookups, num_steps: int, *, first: int = 10, seq_id: int = 0, k: int = 4) -> list[Drafts]:
    """Steps of one sequence of periodic text; each commits what was right, and the token behind it."""
    answers, known = [], first
    for _ in range(num_steps):
        [drafts] = method.propose([Ask(seq_id, k)])
        answers.append(drafts)
        text = periodic(known, known + k + 1)
        num_right = next((i for i, (a, b) in enumerate(zip(drafts.token_ids, text, strict=False)) if a != b), len(drafts.token_ids))
        method.append(seq_id, text[: num_right + 1])
        known += num_right + 1
    return answers


@pytest.mark.parametrize("is_model_right", [True, False])
def test_what_was_right_before_is_taken_whatever_it_says_of_itself(is_model_right: bool) -> None:
    """The one that is wrong has the higher scores."""
    lookup, model = look_up(7, 0.95, with_text=not is_model_right), Scored(8, 0.3, with_text=is_model_right)
    if not is_model_right:
        lookup.score, model.score = 0.3, 0.95
    method = both(lookup, model)
    method.open(0, open_request(periodic(0, 10), sampling=GREEDY))
    answers = run(method, 24)
    assert answers[0].token_ids == [7 if is_model_right else 8] * 4
    assert all(answers[i].token_ids != answers[0].token_ids for i in range(8, 24))
    assert answers[-1].scores[0] > 0.8


def test_the_model_is_not_asked_where_a_lookup_does_better_but_now_and_then() -> None:
    lookup, model = look_up(score=0.9, with_text=True), Scored(8, 0.5)
    method = both(lookup, model)
    for seq_id in range(2):
        method.open(seq_id, open_request(periodic(0, 10), sampling=GREEDY))
    run(method, 64)
    num_asked = len(model.batches)
    spared = method.counts.num_spared_rows
    assert spared + num_asked == 64
    assert 64 // 16 <= num_asked < 24
    assert model.sequences[0] == lookup.sequences[0] == periodic(0, len(model.sequences[0])), "the model missed tokens that it was not asked for"
    # The other sequence's text is another one now: what was right is learned anew, and the model is asked again.
    model._propose, lookup._propose = lookup._propose, lambda tokens, k: [9] * k
    answers = run(method, 160, seq_id=1)
    assert answers[-1].token_ids[0] in PERIOD
    assert len(model.batches) - num_asked > 100


def test_a_model_that_is_as_good_is_always_asked() -> None:
    lookup, model = look_up(score=0.6, with_text=True), Scored(score=0.6, with_text=True)
    method = both(lookup, model)
    method.open(0, open_request(periodic(0, 10), sampling=GREEDY))
    run(method, 48)
    assert (len(model.batches), method.counts.num_spared_rows) == (48, 0)


def test_a_measurement_asks_the_model_and_teaches_nothing() -> None:
    lookup, model = look_up(score=0.9, with_text=True), Scored(8, 0.5)
    method = both(lookup, model)
    method.open(0, DraftOpen(0, 1, periodic(0, 10), 10, GREEDY, 7, tenant_cache_key=MEASUREMENT_TENANT))
    answers = run(method, 32)
    assert len(model.batches) == 32
    assert answers[0].scores == answers[-1].scores


def test_a_model_that_is_behind_leaves_the_lookups_draft_and_its_status_otherwise() -> None:
    lookup, model = look_up(7, 0.3), Scored(8, 0.9)
    method = both(lookup, model)
    method.open(0, open_request([1, 2, 3]))
    for status in (RowStatus.CATCHING_UP, RowStatus.OUT_OF_BLOCKS):
        model.status = status
        [drafts] = method.propose([Ask(0, 2)])
        assert (drafts.status, drafts.token_ids) == (RowStatus.OK, [7, 7])
        lookup._propose, before = lambda tokens, k: [], lookup._propose
        assert method.propose([Ask(0, 2)]) == [Drafts(status)]
        lookup._propose = before
    model.status = RowStatus.OK
    assert method.propose([Ask(0, 0)]) == [Drafts(RowStatus.OK)]


def test_a_sequence_that_one_of_them_refuses_is_open_in_none() -> None:
    model = Scored(8)
    method = ModelAndLookups([Suffix(Limits(24, 1.0, 0.1), max_num_drafts=8), Ngram(1, 2, max_num_drafts=8)], model, ["suffix", "ngram", "model"])
    with pytest.raises(InvalidArgumentError, match="token id is -7"):
        method.open(0, open_request([1, -7]))
    assert model.sequences == {}
    method.open(0, open_request([1, 2]))
    with pytest.raises(InvalidArgumentError, match="token id is -7"):
        method.append(0, [-7])
    method.close(0)
    assert model.sequences == {}
    assert (method.description.method, method.description.max_num_draft_tokens) == ("suffix+ngram+model", 8)
    assert method.description.model_id.endswith("suffix-24+ngram-1-2")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_a_lookups_or_the_models_own_whatever_was_spared(make: Make, sampling: SamplingParams) -> None:
    """Steps with and without drafts, long texts at once, a sequence that ends early and its number taken again: the model's drafts stay those of one
    that has just been given the text."""
    model, ngram = make(max_num_drafts=4), Ngram(2, 4, max_num_drafts=4)
    method = ModelAndLookups([ngram], model, ["ngram", "draft_model"])
    texts = {0: periodic(0, 12), 1: list(range(20)), 2: periodic(3, 20)}
    for seq_id, text in texts.items():
        method.open(seq_id, open_request(text, sampling=sampling))
    num_from_model = 0
    for step in range(40):
        asks = [Ask(seq_id, 4) for seq_id in texts if (step + seq_id) % 11 < 8]
        while method.catch_up(32):
            pass
        for ask, drafts in zip(asks, method.propose(asks), strict=True):
            text = texts[ask.seq_id]
            if drafts.token_ids and drafts.token_ids not in (own := _own(make, text, sampling), _looked_up(text)):
                raise AssertionError(f"step {step}: {drafts.token_ids} is neither {own} nor {_looked_up(text)}")
            num_from_model += drafts.token_ids != _looked_up(text)
        if step == 20:
            method.close(1)
            texts[1] = [5, 6, 7]
            method.open(1, open_request(texts[1], sampling=sampling))
        for seq_id, text in texts.items():
            # Random tokens for the second one, which no look-up knows; at times many at once.
            more = 24 if step % 13 == 12 else 3
            new = [(step * 37 + i * 11 + 1) % 59 for i in range(more)] if seq_id == 1 else periodic(len(text), len(text) + more)
            method.append(seq_id, new)
            text += new
        model.check_integrity()
    assert method.counts.num_spared_rows > 10
    assert num_from_model > 10
    for seq_id in texts:
        method.close(seq_id)
    model.check_integrity()
    assert model.num_free_blocks == model.description.num_blocks


def _own(make: Make, text: list[int], sampling: SamplingParams) -> list[int]:
    fresh: DraftModel = make(num_blocks=32, max_num_drafts=4)
    fresh.open(0, open_request(text, sampling=sampling))
    while fresh.catch_up(512):
        pass
    return fresh.propose([Ask(0, 4)])[0].token_ids


def _looked_up(text: list[int]) -> list[int]:
    lookup = Ngram(2, 4, max_num_drafts=4)
    lookup.open(0, open_request(text))
    return lookup.propose([Ask(0, 4)])[0].token_ids
