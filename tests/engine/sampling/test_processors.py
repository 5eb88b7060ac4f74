"""Each processor, and all in their order, against the reference."""

import pytest
import torch

from specwire.engine.sampling.processors import process_rows
from specwire.engine.sampling.slot import SlotSampling
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams
from tests.engine.sampling import reference

VOCAB = 24
EOS = (2, 5)
PROMPT = [4, 4, 9, 3, 11]
OUTPUT = [6, 9, 6]

CASES = {
    "nothing": {},
    "min_tokens": {"min_tokens": 5},
    "min_tokens with stop ids": {"min_tokens": 5, "stop_token_ids": (7, 8)},
    "min_tokens, EOS ignored": {"min_tokens": 5, "stop_token_ids": (7,), "ignore_eos": True},
    "min_tokens reached": {"min_tokens": 3},
    "allowed": {"allowed_token_ids": (1, 6, 9, 20)},
    "bias": {"logit_bias": {0: 3.5, 6: -2.0, 23: -100.0}},
    "repetition > 1": {"repetition_penalty": 1.7},
    "repetition < 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.25},
    "frequency": {"frequency_penalty": -0.75},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "bad words": {"bad_words_token_ids": ((13,), (9, 6, 1), (6, 2), (11, 14), (6, 10, 12))},
    "everything": {
        "min_tokens": 4,
        "allowed_token_ids": tuple(range(20)),
        "logit_bias": {9: 2.0, 6: -1.0, 21: 5.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "bad_words_token_ids": ((13,), (6, 1), (10, 7, 8)),
    },
}


def _slot(params: SamplingParams, output: list[int] = OUTPUT) -> SlotSampling:
    return SlotSampling(params, key=0, vocab_size=VOCAB, token_ids=PROMPT + output, num_prompt_tokens=len(PROMPT), eos_token_ids=EOS)


@pytest.mark.parametrize("draft_ids", [(), (1,), (6, 1, 6), (10, 7, 8, 12), (9, 6, 9, 6, 9)])
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_reference(case: str, draft_ids: tuple[int, ...]) -> None:
    params = SamplingParams(**CASES[case])  # type: ignore[arg-type]
    raw = 3 * torch.randn(1 + len(draft_ids), VOCAB, generator=torch.Generator().manual_seed(len(draft_ids)))
    logits = raw.clone()
    process_rows(logits, _slot(params), len(PROMPT) + len(OUTPUT), draft_ids)
    for row in range(1 + len(draft_ids)):
        expected = reference.process(raw[row].tolist(), params, PROMPT, [*OUTPUT, *draft_ids[:row]], EOS)
        torch.testing.assert_close(logits[row], torch.tensor(expected), msg=lambda text, row=row: f"{case}, row {row}: {text}")


@pytest.mark.parametrize("case", CASES)
def test_history_by_append_equals_history_by_construction(case: str) -> None:
    params = SamplingParams(**CASES[case])  # type: ignore[arg-type]
    raw = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    grown = _slot(params, output=[])
    grown.append(OUTPUT[:1])
    grown.append(OUTPUT[1:])
    results = []
    for slot in (_slot(params), grown):
        logits = raw.clone()
        process_rows(logits, slot, len(PROMPT) + len(OUTPUT), (6, 1))
        results.append(logits)
    assert torch.equal(*results)


@pytest.mark.parametrize("case", CASES)
def test_slots_know_whether_they_change_logits(case: str) -> None:
    params = SamplingParams(**CASES[case])  # type: ignore[arg-type]
    raw = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    logits = raw.clone()
    slot = _slot(params)
    process_rows(logits, slot, len(PROMPT) + len(OUTPUT), ())
    assert slot.processes_at(len(PROMPT) + len(OUTPUT)) == (not torch.equal(raw, logits))
    assert params.runs_ahead == (not any(len(word) > 1 for word in params.bad_words_token_ids))


def test_counts_of_a_long_history_grow() -> None:
    vocab_size, prompt = 3_000, list(range(0, 600, 2))
    output = [(7 * i * i) % vocab_size for i in range(2_000)]
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    raw = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(9))
    opened = SlotSampling(params, key=0, vocab_size=vocab_size, token_ids=prompt + output, num_prompt_tokens=len(prompt))
    grown = SlotSampling(params, key=0, vocab_size=vocab_size, token_ids=prompt, num_prompt_tokens=len(prompt))
    for start in range(0, len(output), 5):
        grown.append(output[start : start + 5])
    for slot in (opened, grown):
        logits = raw.clone()
        process_rows(logits, slot, len(prompt) + len(output), (2_999,))
        torch.testing.assert_close(logits[0], torch.tensor(reference.process(raw[0].tolist(), params, prompt, output)))
        torch.testing.assert_close(logits[1], torch.tensor(reference.process(raw[1].tolist(), params, prompt, [*output, 2_999])))


def test_an_allowed_mask_comes_first() -> None:
    params = SamplingParams(logit_bias={3: 5.0}, allowed_token_ids=(3, 4))
    mask = torch.ones(2, VOCAB, dtype=torch.bool)
    mask[0, 3] = False
    logits = torch.zeros(2, VOCAB)
    process_rows(logits, _slot(params), len(PROMPT) + len(OUTPUT), (1,), mask)
    assert (logits[0] > -torch.inf).nonzero().flatten().tolist() == [4]
    assert logits[1, [3, 4]].tolist() == [5.0, 0.0]


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    slot = SlotSampling(
        SamplingParams(bad_words_token_ids=((9, 3, 11, 8),)), key=0, vocab_size=VOCAB, token_ids=PROMPT, num_prompt_tokens=len(PROMPT)
    )
    logits = torch.zeros(1, VOCAB)
    process_rows(logits, slot, len(PROMPT), ())
    assert (logits[0] == -torch.inf).nonzero().flatten().tolist() == [8]


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": EOS, "min_tokens": 1},
        {"allowed_token_ids": (7,), "min_tokens": 1, "stop_token_ids": (7,)},
        {"allowed_token_ids": (7, 8), "bad_words_token_ids": ((7,), (8,))},
        {"bad_words_token_ids": tuple((v,) for v in range(VOCAB))},
    ],
)
def test_parameters_that_leave_nothing_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match="no token is left to sample"):
        _slot(SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": (0, VOCAB)}, {"bad_words_token_ids": ((1, VOCAB),)}, {"stop_token_ids": (VOCAB,)}],
)
def test_ids_outside_the_vocabulary_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"token id {VOCAB}, but the model's ids end at {VOCAB - 1}"):
        _slot(SamplingParams(**params))  # type: ignore[arg-type]
