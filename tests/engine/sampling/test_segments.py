"""One round over ragged rows: who is accepted, what is emitted, which log-probabilities."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specwire.engine.sampling.segments import SegmentRows, SegmentTokens, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams
from tests.engine.sampling import reference

VOCAB = 16


def _slot(
    params: SamplingParams | None = None, *, prompt: Sequence[int] = (0,), output: Sequence[int] = (), vocab_size: int = VOCAB, **kwargs: object
) -> SlotSampling:
    token_ids = [*prompt, *output]
    return SlotSampling(
        params or SamplingParams(),
        key=5,
        vocab_size=vocab_size,
        token_ids=token_ids,
        num_prompt_tokens=len(prompt),
        **kwargs,  # type: ignore[arg-type]
    )


def _one_hot(targets: Sequence[int], value: float = 10.0) -> Tensor:
    """Rows whose argmax are the targets."""
    return value * torch.nn.functional.one_hot(torch.tensor(targets), VOCAB).float()


def _emitted(results: Sequence[SegmentTokens]) -> list[list[int]]:
    for result in results:
        assert result.num_accepted == len(result.token_ids) - 1
        assert not result.is_bad
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize(
    ("drafts", "targets", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
        ([[1]], [[1, 2]], [[1, 2]]),
        ([[]], [[5]], [[5]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]),
        ([[1, 2]], [[1, 2, 3]], [[1, 2, 3]]),
        ([[1]], [[2, 3]], [[2]]),
        ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5], [3, 4, 7]]),
    ],
)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.1), SamplingParams(temperature=1.0, top_k=1)])
def test_accepted_drafts_and_next_token(drafts: list[list[int]], targets: list[list[int]], expected: list[list[int]], params: SamplingParams) -> None:
    logits = torch.cat([_one_hot(rows) for rows in targets])
    segments = [SegmentRows(_slot(params), 1, tuple(draft)) for draft in drafts]
    assert _emitted(sample_segments(logits, segments)) == expected


@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("key", [0, 5, 2**64 - 1])
def test_noise_is_that_of_the_key_the_choice_and_the_index_of_each_row(key: int, choice: int) -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(7))
    expected = tuple(reference.sample(logits[row].tolist(), params, key, 3 + row, choice) for row in range(6))
    slot = SlotSampling(params, key=key, choice=choice, vocab_size=VOCAB, token_ids=[0, 1, 2], num_prompt_tokens=3)
    [result] = sample_segments(logits, [SegmentRows(slot, 3, expected[:5])])
    assert result.token_ids == expected


def _with_fallback(targets: Sequence[Sequence[int]]) -> Tensor:
    """Rows whose argmax are the targets and whose second choice is token 15."""
    logits = torch.cat([_one_hot(rows, 100.0) for rows in targets])
    logits[:, 15] += 99.0
    return logits


def test_frequency_penalty_counts_earlier_drafts() -> None:
    drafts, targets = [(1, 1, 1), (), (1, 1, 1)], [[1, 1, 1, 1], [7], [1, 1, 1, 1]]
    segments = [
        SegmentRows(_slot(SamplingParams(frequency_penalty=penalty), output=[seen]), 2, draft)
        for penalty, seen, draft in zip((1.5, 1.5, 0.7), (2, 3, 4), drafts, strict=True)
    ]
    assert _emitted(sample_segments(_with_fallback(targets), segments)) == [[1, 15], [7], [1, 1, 15]]


def test_bad_words() -> None:
    drafts, targets = [(1, 2, 3), (1, 15, 3), (1, 2, 3)], [[1, 2, 3, 4], [1, 15, 3, 4], [1, 2, 3, 4]]
    banned = SamplingParams(bad_words_token_ids=((2,),))
    segments = [SegmentRows(_slot(params), 1, draft) for params, draft in zip((banned, SamplingParams(), banned), drafts, strict=True)]
    assert _emitted(sample_segments(_with_fallback(targets), segments)) == [[1, 15], [1, 15, 3, 4], [1, 15]]


def test_a_bad_word_that_the_drafts_would_complete() -> None:
    segment = SegmentRows(_slot(SamplingParams(bad_words_token_ids=((1, 2, 3),))), 1, (1, 2, 3))
    assert _emitted(sample_segments(_with_fallback([[1, 2, 3, 4]]), [segment])) == [[1, 2, 15]]


def test_allowed_ids() -> None:
    drafts, targets = [(1, 2, 10), (10, 5, 3), (7, 10, 12)], [[1, 2, 10, 5], [10, 5, 10, 5], [7, 10, 12, 5]]
    allowed = [tuple(v for v in range(VOCAB) if v not in excluded) for excluded in (range(5), range(1, 6), range(2, 7))]
    segments = [SegmentRows(_slot(SamplingParams(allowed_token_ids=ids)), 1, draft) for ids, draft in zip(allowed, drafts, strict=True)]
    assert _emitted(sample_segments(_with_fallback(targets), segments)) == [[15], [10, 15], [7, 10, 12, 15]]


def test_min_tokens_ends_within_a_segment() -> None:
    segment = SegmentRows(_slot(SamplingParams(min_tokens=2), eos_token_ids=(3,)), 1, (15, 15))
    assert _emitted(sample_segments(_with_fallback([[3, 3, 3]]), [segment])) == [[15, 15, 3]]
    segment = SegmentRows(_slot(SamplingParams(min_tokens=2), output=(4,), eos_token_ids=(3,)), 2, (15, 15))
    assert _emitted(sample_segments(_with_fallback([[3, 3, 3]]), [segment])) == [[15, 3]]


def test_a_grammar_mask_holds_row_by_row() -> None:
    mask = torch.ones(3, VOCAB, dtype=torch.bool)
    mask[1, 2] = False
    segment = SegmentRows(_slot(), 1, (1, 2), mask)
    assert _emitted(sample_segments(_with_fallback([[1, 2, 3]]), [segment])) == [[1, 15]]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.2), SamplingParams()]
)
def test_logits_and_slots_are_left_as_they_were(params: SamplingParams) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    segments = [SegmentRows(_slot(params), 1, (3, 3)), SegmentRows(_slot(), 1)]
    first = sample_segments(logits, segments)
    assert torch.equal(logits, before)
    assert sample_segments(logits, segments) == first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [(0.9, 0.5, 0.2), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.7,)])
def test_synthetic_acceptance(temperature: float, rates: tuple[float, ...]) -> None:
    num_sequences, drafts = 4_000, (1, 2, 3)
    params = SamplingParams(temperature=temperature)
    segments = [
        SegmentRows(SlotSampling(params, key=key, vocab_size=4, token_ids=[0], num_prompt_tokens=1, synthetic_rates=rates), 1, drafts)
        for key in range(num_sequences)
    ]
    results = sample_segments(torch.tensor([9.0, 0.0, 0.0, 0.0]).expand(4 * num_sequences, 4), segments)
    for position in range(3):
        share = sum(result.num_accepted > position for result in results) / num_sequences
        expected = rates[position] if position < len(rates) else 0.0
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / num_sequences))
    for result in results:
        assert result.token_ids[:-1] == drafts[: result.num_accepted]
    assert sum(result.token_ids[-1] == 0 for result in results) > 0.99 * num_sequences  # rejected and bonus rows emit the target's token


def test_strict_and_synthetic_side_by_side() -> None:
    logits = torch.cat([_one_hot([5, 5, 5])] * 3)
    segments = [
        SegmentRows(_slot(synthetic_rates=(1.0, 0.0)), 1, (1, 2)),
        SegmentRows(_slot(), 1, (1, 2)),
        SegmentRows(_slot(synthetic_rates=(1.0, 1.0)), 1, (1, 2)),
    ]
    assert _emitted(sample_segments(logits, segments)) == [[1, 5], [5], [1, 2, 5]]


BAD_PARAMS = [
    SamplingParams(logprobs=2),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=3, frequency_penalty=1.0, logprobs=0),
]


@pytest.mark.parametrize("params", BAD_PARAMS)
@pytest.mark.parametrize(("bad_row", "num_accepted"), [(0, 0), (1, 1), (2, 2)])
def test_a_bad_row_ends_only_its_own_sequence(params: SamplingParams, bad_row: int, num_accepted: int) -> None:
    logits = torch.cat([_one_hot([1, 2, 3], 50.0), _one_hot([4], 50.0)])
    logits[bad_row, 9] = torch.nan
    bad, good = sample_segments(logits, [SegmentRows(_slot(params), 1, (1, 2)), SegmentRows(_slot(params), 1)], margins=True)
    assert bad.is_bad
    assert bad.num_accepted == num_accepted
    assert bad.token_ids == (1, 2)[:num_accepted]
    assert bad.margins is not None
    assert len(bad.margins) == num_accepted
    assert (bad.logprobs is None) == (params.logprobs is None)
    assert len(bad.logprobs or bad.token_ids) == num_accepted
    assert not good.is_bad
    assert good.token_ids == (4,)


@pytest.mark.parametrize("params", BAD_PARAMS)
def test_a_bad_row_accepts_nothing(params: SamplingParams) -> None:
    """Whatever token a bad row comes out with."""
    logits = _one_hot([1, 2], 50.0)
    logits[0, 9] = torch.nan
    results = sample_segments(logits.repeat(VOCAB, 1), [SegmentRows(_slot(params), 1, (draft_id,)) for draft_id in range(VOCAB)])
    assert [(result.is_bad, result.token_ids) for result in results] == [(True, ())] * VOCAB


@pytest.mark.parametrize("params", BAD_PARAMS)
def test_a_bad_row_behind_a_rejection_does_not_matter(params: SamplingParams) -> None:
    logits = _one_hot([1, 2, 3], 50.0)
    logits[2] = torch.nan
    [result] = sample_segments(logits, [SegmentRows(_slot(params), 1, (7, 2))])
    assert not result.is_bad
    assert result.token_ids == (1,)


def test_a_mask_does_not_hide_a_nan() -> None:
    logits = _one_hot([1, 1])
    logits[0, 9], logits[1, 9] = torch.nan, torch.inf
    slot = _slot(SamplingParams(allowed_token_ids=(1, 2)))
    assert [result.is_bad for result in sample_segments(logits, [SegmentRows(slot, 1), SegmentRows(slot, 1)])] == [True, True]


def test_a_mask_that_leaves_nothing_is_a_bad_row() -> None:
    mask = torch.zeros(1, VOCAB, dtype=torch.bool)
    assert sample_segments(_one_hot([1]), [SegmentRows(_slot(), 1, (), mask)])[0].is_bad


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab_size", [VOCAB, 1024])
def test_logprobs_are_of_the_raw_logits(temperature: float, vocab_size: int) -> None:
    logits = torch.randint(-4, 5, (5, vocab_size), generator=torch.Generator().manual_seed(1)).float()  # with many ties
    params = SamplingParams(temperature=temperature, top_p=0.9, logit_bias={3: 2.0, 4: 9.0}, repetition_penalty=1.5, logprobs=4)
    draft_ids: tuple[int, ...] = ()
    for _ in range(2):  # drafts that are right
        segment = SegmentRows(_slot(params, vocab_size=vocab_size), 1, draft_ids)
        draft_ids = sample_segments(logits[: 1 + len(draft_ids)], [segment])[0].token_ids
    segments = [
        SegmentRows(_slot(params, vocab_size=vocab_size), 1, draft_ids),
        SegmentRows(_slot(vocab_size=vocab_size), 1),
        SegmentRows(_slot(SamplingParams(logprobs=0), vocab_size=vocab_size), 1),
    ]
    first, second, third = sample_segments(logits, segments)
    assert first.num_accepted == 2
    assert second.logprobs is None
    assert first.logprobs is not None
    expected = logits.log_softmax(dim=1)
    for row, (token_id, entry) in enumerate(zip(first.token_ids, first.logprobs, strict=True)):
        best = sorted(range(vocab_size), key=lambda v, row=row: (-logits[row, v].item(), v))[:4]
        assert entry.sampled == pytest.approx(expected[row, token_id].item(), abs=1e-5)
        assert [top_id for top_id, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx(expected[row, best].tolist(), abs=1e-5)
    assert third.logprobs is not None
    assert third.logprobs[0].top == []
    assert third.logprobs[0].sampled == pytest.approx(expected[4].max().item(), abs=1e-5)


def test_rows_and_segments_must_match() -> None:
    with pytest.raises(AssertionError, match="3 rows of logits for segments of 2 rows"):
        sample_segments(torch.zeros(3, VOCAB), [SegmentRows(_slot(), 1, (1,))])
