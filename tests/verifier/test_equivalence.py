"""Whatever the rounds look like, every sequence's text and log-probabilities equal a one-token-a-step reference loop."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from specwire.messages import RowStatus, SlotRef, TokenLogprobs
from specwire.sampling_params import SamplingParams
from tests.verifier.harness import EOS, Rounds, ahead, decode, open_message, prefill, reference, tiny_model

NUM_TOKENS = 24
VOCAB = 61
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=None),
    "top_p": SamplingParams(temperature=0.7, top_p=0.95, max_tokens=None, logprobs=0),
    "top_k and penalties": SamplingParams(
        temperature=1.0, top_k=10, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, max_tokens=None
    ),
    "min_p": SamplingParams(temperature=1.5, min_p=0.1, max_tokens=None),
    "min_tokens": SamplingParams(temperature=1.2, min_tokens=10, stop_token_ids=(5, 6), max_tokens=None, logit_bias={EOS: 3.0, 5: 3.0}),
    "logit_bias": SamplingParams(temperature=0.5, logit_bias={3: 4.0, 9: -100.0}, logprobs=4, max_tokens=None),
    "bad words": SamplingParams(bad_words_token_ids=((7,), (16, 53), (1, 2, 3)), temperature=0.9, max_tokens=None),
    "allowed ids": SamplingParams(allowed_token_ids=(4, 8, 15, 16, 23, 42), temperature=1.0, repetition_penalty=1.1, logprobs=2, max_tokens=None),
    "greedy with penalties": SamplingParams(frequency_penalty=1.0, logprobs=1, max_tokens=None),
}


@dataclass
class Case:
    """One sequence and what it should become."""

    prompt: list[int]
    sampling: SamplingParams
    key: int
    choice: int
    truth: list
    slot: int
    epoch: int = 0
    is_open: bool = False
    is_prefilled: bool = False
    parent: int = 0
    from_round: int = 0  # the round that sampled the last token without drafts; 0 = none
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def tokens(self):
        return self.prompt + self.output

    @property
    def is_done(self):
        return len(self.output) >= NUM_TOKENS


@pytest.fixture(scope="module")
def cases_of():
    torch.set_num_threads(1)
    model = tiny_model(seed=5)
    generator = random.Random(0)
    recipes = []
    for index, name in enumerate(SAMPLINGS):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.choice((1, 5, 17, 40)))]
        key, choice = generator.getrandbits(64), index % 3
        recipes.append((prompt, SAMPLINGS[name], key, choice, reference(model, prompt, NUM_TOKENS + 10, SAMPLINGS[name], key=key, choice=choice)))
    return model, lambda: [Case(*recipe, slot=slot) for slot, recipe in enumerate(recipes)]


def draft(case, generator):
    """Right, partly right and garbage drafts of 0 to 8 tokens."""
    num = generator.randrange(9)
    truth = [token_id for token_id, _, _ in case.truth[len(case.output) :]][:num]
    kind = generator.choice(("right", "wrong", "garbage"))
    if kind == "right":
        return truth
    return [generator.randrange(VOCAB) if kind == "garbage" or generator.random() < 0.3 else token for token in truth]


def take(case, row, round_number, num_drafts, num_accepted_total):
    case.parent = round_number
    case.output += row.token_ids
    if row.token_ids:
        case.is_prefilled = True
        case.from_round = 0 if num_drafts else round_number
        assert (row.logprobs is None) == (case.sampling.logprobs is None)
        case.logprobs += row.logprobs or []
    return num_accepted_total + row.num_accepted


def check(case):
    """Equal to the reference, but for what rounding may excuse: returns the number of excused sequences."""
    for position, (got, (expected, logprobs, is_near_tie)) in enumerate(zip(case.output, case.truth, strict=False)):
        if got != expected:
            assert is_near_tie, f"{case.sampling}: token {position} is {got}, expected {expected}: {case.output}"
            return 1
        if logprobs is not None:
            ours = case.logprobs[position]
            assert ours.sampled == pytest.approx(logprobs.sampled, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in logprobs.top]
            assert [value for _, value in ours.top] == pytest.approx([value for _, value in logprobs.top], abs=1e-4)
    return 0


@pytest.mark.parametrize("num_blocks", [200, 14])
@pytest.mark.parametrize("seed", range(3))
def test_random_rounds_equal_the_reference(cases_of, seed, num_blocks, make):
    model, make_cases = cases_of
    cases = make_cases()
    generator = random.Random(seed)
    rounds = Rounds(make(model, num_blocks=num_blocks, max_num_seqs=9, max_num_batched_tokens=512))
    seen = dict.fromkeys(RowStatus, 0)
    num_accepted = num_drafted = 0
    while not all(case.is_done for case in cases):
        closes, opens, rows, owners = [], [], [], []
        for case in generator.sample(cases, len(cases)):
            preempt = case.is_open and (case.is_done or generator.random() < 0.03)
            if preempt:
                closes.append(SlotRef(case.slot, case.epoch))
                case.is_open = False
            if case.is_done or generator.random() < 0.3:
                continue
            if not case.is_open:
                case.epoch, case.is_open, case.is_prefilled, case.parent, case.from_round = case.epoch + 1, True, False, 0, 0
                opens.append(
                    open_message(
                        case.slot,
                        case.tokens,
                        case.sampling,
                        epoch=case.epoch,
                        num_prompt_tokens=len(case.prompt),
                        noise_key=case.key,
                        choice=case.choice,
                    )
                )
            if not case.is_prefilled:
                row = prefill(case.slot, generator.choice((1, 4, 9, 100)), epoch=case.epoch, parent=case.parent)
            elif case.from_round and not case.sampling.bad_words_token_ids and generator.random() < 0.4:
                row = ahead(case.slot, len(case.tokens), case.from_round, epoch=case.epoch, parent=case.parent)
            else:
                row = decode(case.slot, case.tokens, draft(case, generator), epoch=case.epoch, parent=case.parent)
            if generator.random() < 0.05:
                row = row._replace(parent_round=row.parent_round + 1000)
            rows.append(row)
            owners.append(case)
        result = rounds.launch(rows, opens=opens, closes=closes)
        for case, sent, row in zip(owners, rows, result.rows, strict=True):
            seen[row.status] += 1
            if row.status == RowStatus.OK:
                num_accepted = take(case, row, result.round, len(sent.draft_tokens), num_accepted)
                num_drafted += len(sent.draft_tokens)
                expected = len(case.tokens) - 1 if case.is_prefilled else row.num_computed_tokens
                assert row.num_computed_tokens == expected
            elif row.status == RowStatus.OUT_OF_BLOCKS:  # preempt the newest, as a coordinator would
                victim = max((c for c in cases if c.is_open), key=lambda c: c.slot)
                rounds.launch(closes=[SlotRef(victim.slot, victim.epoch)])
                victim.is_open = False
            else:
                assert sent.parent_round >= 1000 or not case.is_open
    assert sum(map(check, cases)) <= 1
    assert 0 < num_accepted < num_drafted
    assert seen[RowStatus.STALE] > 0
    assert (seen[RowStatus.OUT_OF_BLOCKS] > 0) == (num_blocks == 14)
    rounds.launch(closes=[SlotRef(case.slot, case.epoch) for case in cases if case.is_open])
    assert rounds.verifier.num_free_blocks == num_blocks


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
