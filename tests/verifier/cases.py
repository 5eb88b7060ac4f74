"""Sequences of all kinds of parameters, and what a one-token-a-step reference loop makes of them."""

import random
from dataclasses import dataclass, field

import pytest

from specwire.engine.models.decoder import Decoder
from specwire.messages import RowStatus, TokenLogprobs, VerifyOpen, VerifyRow, VerifyRowResult
from specwire.sampling_params import SamplingParams
from tests.verifier.harness import EOS, open_message, reference

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
    """One sequence: what it should become, and how far it is at the verifier."""

    prompt: list[int]
    sampling: SamplingParams
    key: int
    choice: int
    truth: list
    slot: int
    epoch: int = 0
    is_open: bool = False
    is_prefilled: bool = False
    has_failed: bool = False  # a row did not run
    parent: int = 0
    last_ran: int = 0
    last_num_drafts: int = 0
    num_unread: int = 0  # rows in flight
    num_ahead: int = 0  # tokens that these sample for certain
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return len(self.output) >= NUM_TOKENS

    def reopen(self) -> VerifyOpen:
        """Its next life, with the tokens that are known."""
        self.epoch, self.is_open, self.is_prefilled, self.has_failed = self.epoch + 1, True, False, False
        self.parent = self.last_ran = self.last_num_drafts = self.num_unread = self.num_ahead = 0
        return open_message(
            self.slot,
            self.tokens,
            self.sampling,
            epoch=self.epoch,
            num_prompt_tokens=len(self.prompt),
            noise_key=self.key,
            choice=self.choice,
        )

    def sent(self, round_number: int, row: VerifyRow, *, is_certain: bool) -> None:
        """A row is in flight."""
        self.parent, self.last_num_drafts = round_number, len(row.draft_tokens)
        self.num_unread += 1
        self.num_ahead += is_certain

    def answered(self, round_number: int, row: VerifyRowResult, *, is_certain: bool) -> None:
        """It is not any more."""
        self.num_unread -= 1
        self.num_ahead -= is_certain
        if row.status != RowStatus.OK:
            assert row.status != RowStatus.STALE or self.has_failed, f"round {round_number}: {row}"
            self.has_failed = True
            return
        self.last_ran = round_number
        self.output += row.token_ids
        self.is_prefilled = self.is_prefilled or bool(row.token_ids)
        assert len(row.token_ids) > 0 or not is_certain, f"round {round_number}: {row}"
        assert (row.logprobs is not None) == (self.sampling.logprobs is not None) or not row.token_ids
        self.logprobs += row.logprobs or []
        assert row.num_computed_tokens == len(self.tokens) - 1 or not self.is_prefilled

    def resume(self) -> None:
        """Goes on behind the last row that ran; nothing is in flight."""
        self.parent, self.has_failed = self.last_ran, False


def make_recipes(model: Decoder) -> list[tuple]:
    """The first fields of a case for each of SAMPLINGS."""
    generator = random.Random(0)
    recipes = []
    for index, sampling in enumerate(SAMPLINGS.values()):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.choice((1, 5, 17, 40)))]
        key, choice = generator.getrandbits(64), index % 3
        recipes.append((prompt, sampling, key, choice, reference(model, prompt, NUM_TOKENS + 10, sampling, key=key, choice=choice)))
    return recipes


def draft(case: Case, generator: random.Random) -> list[int]:
    """Right, partly right and garbage drafts of 0 to 8 tokens."""
    num = generator.randrange(9)
    truth = [token_id for token_id, _, _ in case.truth[len(case.output) :]][:num]
    kind = generator.choice(("right", "wrong", "garbage"))
    if kind == "right":
        return truth
    return [generator.randrange(VOCAB) if kind == "garbage" or generator.random() < 0.3 else token for token in truth]


def check(case: Case) -> int:
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
