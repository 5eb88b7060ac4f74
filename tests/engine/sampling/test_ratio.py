"""The ratio test leaves the target's distribution as it is, whatever the drafts are drawn from; without it, the same drafts would bend it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specwire.engine.sampling.philox import Stream, key_to_int64, uniforms
from specwire.engine.sampling.proposal import ProposedDrafts, propose_drafts
from specwire.engine.sampling.ratio import ratio_test, target_probs
from specwire.engine.sampling.sampler import SamplerRows
from specwire.engine.sampling.segments import SegmentRows, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.proposals import RowProposals
from specwire.sampling_params import SamplingParams

VOCAB = 12
NUM_KEYS = 6000
FIRST = 5
"""Index of the first token of all texts here."""


def _tables(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the next token by the last one, [V, V]: of a target, and of a draft model that is like it."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
    return target, target + 1.2 * torch.randn(VOCAB, VOCAB, generator=generator)


def _probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """[R, V] float64, by the definition: one row at a time, sorted."""
    result = torch.zeros(logits.shape, dtype=torch.float64)
    for row, values in enumerate(logits.double() / params.temperature):
        order = values.argsort(descending=True, stable=True)
        probs = values.softmax(0)[order]
        probs[probs < params.min_p * probs[0]] = 0.0
        if params.top_k > 0:
            probs[params.top_k :] = 0.0
        probs /= probs.sum()
        probs[probs.cumsum(0) - probs >= params.top_p] = 0.0
        result[row, order] = probs / probs.sum()
    return result


def _draft(table: Tensor, last: int, num_drafts: int, num_candidates: int, params: SamplingParams) -> list[ProposedDrafts]:
    """Drafts of all keys, position by position."""
    found: list[ProposedDrafts] = []
    previous = torch.full((NUM_KEYS,), last)
    for position in range(num_drafts):
        found.append(
            propose_drafts(
                table[previous],
                num_candidates,
                temperatures=[params.temperature] * NUM_KEYS,
                keys=range(NUM_KEYS),
                indices=[FIRST + position] * NUM_KEYS,
                choices=[0] * NUM_KEYS,
            )
        )
        previous = found[-1].token_ids
    return found


def _slot(key: int, params: SamplingParams, text: Sequence[int]) -> SlotSampling:
    return SlotSampling(params, key=key, vocab_size=VOCAB, token_ids=text, num_prompt_tokens=FIRST, tests_ratio=True)


def _emit(target: Tensor, drafts: Sequence[ProposedDrafts], params: SamplingParams, *, sends: bool = True) -> list[tuple[tuple[int, ...], int]]:
    """What each key emits in one round, and how many drafts of it."""
    ids = torch.stack([one.token_ids for one in drafts], 1)  # [keys, K]
    candidates = torch.stack([one.candidate_ids for one in drafts], 1).numpy().astype(np.int32)
    probs = torch.stack([one.candidate_probs for one in drafts], 1).numpy()
    segments = [
        SegmentRows(_slot(key, params, [0] * FIRST), FIRST, ids[key].tolist(), proposals=RowProposals(candidates[key], probs[key]) if sends else None)
        for key in range(NUM_KEYS)
    ]
    rows = torch.cat([torch.zeros(NUM_KEYS, 1, dtype=torch.int64), ids], 1).flatten()
    return [(result.token_ids, result.num_accepted) for result in sample_segments(target[rows], segments)]


def _p_value(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts [V] against probabilities, of which those that are 0 must never have come."""
    assert not counts[expected == 0].any(), f"{counts[expected == 0].tolist()} tokens outside of the support"
    likely = expected * counts.sum() >= 5
    observed = [*counts[likely].tolist(), int(counts[~likely].sum())]
    wanted = [*(expected[likely] * counts.sum()).tolist(), float(expected[~likely].sum() * counts.sum())]
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = [value * sum(observed) / sum(wanted) for value in wanted]
    return float(stats.chisquare(observed, wanted).pvalue) if len(observed) > 1 else 1.0


def _worst_p(emitted: Sequence[tuple[tuple[int, ...], int]], target: Tensor, params: SamplingParams) -> float:
    """Over all positions and tokens before them that are frequent enough: the least p-value, corrected for their number."""
    expected = _probs(target, params)
    values = []
    for position in range(max(len(tokens) for tokens, _ in emitted)):
        for before in range(VOCAB):
            nexts = [t[position] for t, _ in emitted if len(t) > position and (t[position - 1] if position else 0) == before]
            if len(nexts) >= 300:
                values.append(_p_value(torch.bincount(torch.tensor(nexts), minlength=VOCAB), expected[before]))
    assert len(values) >= 2, f"only {len(values)} contexts are frequent"
    return min(values) * len(values)


@pytest.mark.parametrize(
    ("params", "num_candidates", "num_drafts"),
    [
        (SamplingParams(temperature=1.0), 4, 4),
        (SamplingParams(temperature=1.0, top_k=5), 4, 3),
        (SamplingParams(temperature=0.7, top_p=0.8), VOCAB, 2),
        (SamplingParams(temperature=1.3, min_p=0.1, top_k=6, top_p=0.95), 3, 1),
    ],
    ids=["plain", "top_k", "top_p", "all"],
)
def test_emits_the_targets_distribution(params: SamplingParams, num_candidates: int, num_drafts: int) -> None:
    target, draft = _tables(3)
    emitted = _emit(target, _draft(draft, 0, num_drafts, num_candidates, params), params)
    assert _worst_p(emitted, target, params) > 1e-3
    share = sum(num for _, num in emitted) / NUM_KEYS
    assert 0.3 < share < num_drafts, f"{share} drafts accepted: one side of the test was not tried"


def test_drafts_that_were_not_drawn() -> None:
    """As those of a lookup, or of a draft model at temperature 0: q is 1 at the draft."""
    params = SamplingParams(temperature=1.0, top_k=6)
    target, draft = _tables(4)
    emitted = _emit(target, _draft(draft, 0, 3, VOCAB, SamplingParams(temperature=0.0)), params, sends=False)
    assert _worst_p(emitted, target, params) > 1e-3


def test_drawn_drafts_without_their_probabilities() -> None:
    """Nothing is lost but acceptance: of a draft the test takes no notice unless it is accepted."""
    params = SamplingParams(temperature=1.0)
    target, draft = _tables(5)
    drafts = _draft(draft, 0, 2, 6, params)
    without = _emit(target, drafts, params, sends=False)
    assert _worst_p(without, target, params) > 1e-3
    assert sum(num for _, num in without) < sum(num for _, num in _emit(target, drafts, params))


def test_wrong_probabilities_show() -> None:
    """The tests above would see a drafter whose probabilities are not those that it draws with."""
    params = SamplingParams(temperature=1.0)
    target, draft = _tables(3)
    drafts = _draft(draft, 0, 2, 4, params)
    flat = [ProposedDrafts(one.token_ids, one.probs, one.candidate_ids, torch.full_like(one.candidate_probs, 0.25)) for one in drafts]
    assert _worst_p(_emit(target, flat, params), target, params) < 1e-6


def test_shared_noise_would_show() -> None:
    """Drafts drawn with the noise that decides about them are not independent of it."""
    target, draft = _tables(3)
    keys = torch.tensor([key_to_int64(key) for key in range(NUM_KEYS)])
    indices, choices = torch.full((NUM_KEYS,), FIRST), torch.zeros(NUM_KEYS, dtype=torch.int64)
    q, p = draft[:1].double().softmax(1).expand(NUM_KEYS, -1), target[:1].double().softmax(1).expand(NUM_KEYS, -1)
    accept, residual = (uniforms(keys, indices, choices, stream) for stream in (Stream.ACCEPT, Stream.RESIDUAL))
    columns = torch.arange(VOCAB).expand(NUM_KEYS, -1)
    values = {}
    for name, noise in (("shared", accept), ("private", uniforms(keys, indices, choices, Stream.DRAFT))):
        drafts = torch.searchsorted(q.cumsum(1).contiguous(), noise.unsqueeze(1)).squeeze(1).clamp(max=VOCAB - 1)
        tokens = ratio_test(p, drafts, columns, q, accept, residual)
        values[name] = _p_value(torch.bincount(tokens, minlength=VOCAB), p[0])
    assert values["private"] > 1e-3
    assert values["shared"] < 1e-6


def test_noise_goes_by_index() -> None:
    """A round that is run again, with other sequences or fewer drafts, tests its drafts alike: what was emitted is not drawn anew."""
    params = SamplingParams(temperature=1.0)
    target, draft = _tables(6)
    drafts = _draft(draft, 0, 3, 6, params)
    emitted = [tokens for tokens, _ in _emit(target, drafts, params)]
    again = [tokens for tokens, _ in _emit(target, drafts[:2], params)]
    assert [tokens[:2] for tokens in again if len(tokens) < 3] == [tokens[:2] for tokens, short in zip(emitted, again, strict=True) if len(short) < 3]
    assert any(len(tokens) == 4 for tokens in emitted)


def test_greedy_stays_strict() -> None:
    target, _ = _tables(7)
    best = target.argmax(1).tolist()
    drafts = [best[0], best[best[0]], (best[best[best[0]]] + 1) % VOCAB]
    slot = _slot(1, SamplingParams(temperature=0.0), [0] * FIRST)
    rows = target[torch.tensor([0, *drafts])]
    (result,) = sample_segments(rows, [SegmentRows(slot, FIRST, drafts)])
    assert result.token_ids == (drafts[0], drafts[1], best[drafts[1]])


def test_filters_are_those_of_sampling() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 500, generator=generator)
    several = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=1.4, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=0.9, top_k=40, top_p=0.5),
    ]
    rows = SamplerRows.build(several, range(5), [3] * 5, [0] * 5)
    expected = torch.cat([_probs(logits[i : i + 1], params) for i, params in enumerate(several)])
    torch.testing.assert_close(target_probs(logits, rows), expected)


def test_bad_rows_end_the_segment() -> None:
    params = SamplingParams(temperature=1.0)
    target, _ = _tables(8)
    best = int(target[0].argmax())
    rows = torch.stack([torch.zeros(VOCAB).index_fill_(0, torch.tensor(best), 60.0), target[1], target[2]])
    rows[1, 3] = torch.nan
    slot = _slot(1, params, [0] * FIRST)
    (result,) = sample_segments(rows, [SegmentRows(slot, FIRST, [best, 2])])
    assert (result.is_bad, result.num_accepted, result.token_ids) == (True, 1, (best,))
    (result,) = sample_segments(torch.full_like(rows, torch.nan), [SegmentRows(slot, FIRST, [best, 2])])
    assert (result.is_bad, result.token_ids) == (True, ())


def test_an_empty_residual() -> None:
    """q above p everywhere, by rounding alone."""
    probs = torch.tensor([[0.5, 0.5 - 1e-9, 0.0]], dtype=torch.float64)
    ids, q = torch.tensor([[0, 1, 1]]), torch.tensor([[0.5, 0.5, 0.0]])
    high = torch.tensor([1.0 - 2.0**-33], dtype=torch.float64)
    assert ratio_test(probs, torch.tensor([1]), ids, q, high, high).tolist() == [1]
