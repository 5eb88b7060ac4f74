"""What speculative decoding emits has the distribution of the target's processed logits: chi-square tests, fixed keys."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from specwire.engine.sampling.draft import sample_draft
from specwire.engine.sampling.sampler import SamplerRows, sample_rows
from specwire.engine.sampling.segments import SegmentRows, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams
from tests.engine.sampling import reference

VOCAB = 5
NUM_TOKENS = 3
NUM_DRAFTS = 3
NUM_DRAWS = 100_000  # a token whose probability is off by 0.01 is six standard deviations off
START = 2  # last token of the prompt
TARGET = 0.6 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))  # logits of the next token, by the last
DRAFT = TARGET + 0.4 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))  # the drafter's
FIXED_DRAFT = int(TARGET[START].argmax())


def _chi_square(counts: Tensor, probs: Tensor) -> float:
    """p-value; cells with few expected draws are merged, impossible ones must be empty."""
    counts, expected = counts.flatten().double(), probs.flatten().double() * counts.sum()
    assert counts[expected == 0].sum() == 0, "drew what has probability 0"
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum().unsqueeze(0)])
    wanted = torch.cat([expected[~small], expected[small].sum().unsqueeze(0)])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(observed) == 1:  # a certain token
        return 1.0
    return float(stats.chisquare(observed.numpy(), wanted.numpy() * float(observed.sum() / wanted.sum())).pvalue)


def _next_probs(params: SamplingParams) -> Tensor:
    """[V, V]: processed distribution of the next token, by the last."""
    return torch.tensor([reference.distribution(row, params) for row in TARGET.tolist()], dtype=torch.float64)


@dataclass(frozen=True)
class Decoded:
    token_ids: Tensor  # [N, NUM_TOKENS]
    first_rejected: Tensor  # [N] bool: the first round rejected its first draft
    num_accepted: int


def _decode(params: SamplingParams, drafter: str, choice: int = 0) -> Decoded:
    """Speculative decoding of NUM_DRAWS sequences at once: propose, verify, accept while equal."""
    tokens = torch.full((NUM_DRAWS, 1 + NUM_TOKENS), START)
    lengths = torch.ones(NUM_DRAWS, dtype=torch.int64)
    first_rejected = torch.zeros(NUM_DRAWS, dtype=torch.bool)
    total = 0
    while len(going := (lengths < 1 + NUM_TOKENS).nonzero().squeeze(1)):
        context = tokens[going, lengths[going] - 1].unsqueeze(1)  # [n, 1 + drafts]
        for j in range(NUM_DRAFTS):
            context = torch.cat([context, _draft(params, drafter, context[:, -1], going, lengths[going] + j, choice).unsqueeze(1)], dim=1)
        indices = lengths[going].unsqueeze(1) + torch.arange(NUM_DRAFTS + 1)
        rows = _rows(params, going.unsqueeze(1).expand_as(indices).flatten(), indices.flatten(), choice)
        targets = sample_rows(TARGET[context.flatten()], rows).token_ids.view_as(context)
        num_accepted = (targets[:, :-1] == context[:, 1:]).int().cumprod(dim=1).sum(dim=1)
        total += int(num_accepted.sum())
        first_rejected[going] |= (num_accepted == 0) & (lengths[going] == 1)
        for j in range(NUM_DRAFTS + 1):
            writes = (num_accepted >= j) & (lengths[going] + j < tokens.shape[1])
            tokens[going[writes], lengths[going[writes]] + j] = targets[writes, j]
        lengths[going] += num_accepted + 1
    return Decoded(tokens[:, 1:], first_rejected, total)


def _rows(params: SamplingParams, keys: Tensor, indices: Tensor, choice: int) -> SamplerRows:
    """Rows of equal parameters, from tensors [n]."""
    one = SamplerRows.build([params], [0], [0], [choice]).select(torch.zeros_like(keys))
    return replace(one, keys=keys, indices=indices)


def _draft(params: SamplingParams, drafter: str, last: Tensor, keys: Tensor, indices: Tensor, choice: int) -> Tensor:
    if drafter == "fixed":
        return torch.full_like(last, FIXED_DRAFT)
    num = len(last)
    temperature = params.temperature if drafter == "shared" else 0.0
    sampled = sample_draft(DRAFT[last], temperatures=[temperature] * num, keys=keys.tolist(), indices=indices.tolist(), choices=[choice] * num)
    return sampled.token_ids


@pytest.mark.parametrize(
    ("temperature", "filters", "drafter"),
    [
        (0.3, {"top_k": 2}, "shared"),
        (1.5, {"top_p": 0.8}, "shared"),
        *(
            pytest.param(temperature, filters, "shared", marks=pytest.mark.slow)
            for temperature, filters in [(0.3, {"top_p": 0.8}), (0.7, {"top_p": 0.8}), (0.7, {"top_k": 2}), (1.5, {"top_k": 2})]
        ),
        (0.7, {"top_p": 0.8}, "argmax"),
        (1.5, {}, "fixed"),
    ],
)
def test_emitted_tokens_have_the_target_s_distribution(temperature: float, filters: dict[str, float], drafter: str) -> None:
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    probs = _next_probs(params)
    decoded = _decode(params, drafter)
    assert decoded.num_accepted > 0
    cells = [decoded.token_ids[:, i] * VOCAB ** (NUM_TOKENS - 1 - i) for i in range(NUM_TOKENS)]
    counts = torch.bincount(torch.stack(cells).sum(dim=0), minlength=VOCAB**NUM_TOKENS)
    joint = torch.stack([probs[START, a] * probs[a, b] * probs[b, c] for a, b, c in itertools.product(range(VOCAB), repeat=3)])
    assert _chi_square(counts, joint) > 1e-4

    # Right after a rejection: the second token, of the sequences whose first draft was rejected.
    rejected = decoded.token_ids[decoded.first_rejected]
    assert len(rejected) > 100
    for first in range(VOCAB):
        second = rejected[rejected[:, 0] == first, 1]
        if len(second) > 100:
            assert _chi_square(torch.bincount(second, minlength=VOCAB), probs[first]) > 1e-4


def test_a_rejection_itself_emits_the_rest_of_the_distribution() -> None:
    """With a draft that does not look at the noise, the token that replaces it has p without it, renormalised."""
    params = SamplingParams(temperature=1.5, top_p=0.95)
    decoded = _decode(params, "fixed")
    rest = _next_probs(params)[START].clone()
    rest[FIXED_DRAFT] = 0.0
    first = decoded.token_ids[decoded.first_rejected, 0]
    assert _chi_square(torch.bincount(first, minlength=VOCAB), rest / rest.sum()) > 1e-4


def test_choices_of_a_request_are_independent() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    probs = _next_probs(params)
    decoded = [_decode(params, "shared", choice).token_ids for choice in (0, 1)]
    for position in range(NUM_TOKENS):
        marginal = probs[START] if position == 0 else (probs[START].unsqueeze(0) @ torch.linalg.matrix_power(probs, position)).squeeze(0)
        counts = torch.bincount(decoded[0][:, position] * VOCAB + decoded[1][:, position], minlength=VOCAB**2)
        assert _chi_square(counts, torch.outer(marginal, marginal)) > 1e-4


def test_neighbouring_indices_are_independent() -> None:
    logits = torch.zeros(NUM_DRAWS + 1, 4)
    rows = _rows(SamplingParams(temperature=1.0), torch.zeros(len(logits), dtype=torch.int64), torch.arange(len(logits)), 0)
    drawn = sample_rows(logits, rows).token_ids
    assert _chi_square(torch.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16), torch.full((16,), 1 / 16)) > 1e-4


def test_whole_rounds_with_processors() -> None:
    """The same through `sample_segments`, with parameters that look at the history: drafts that are rejected leave no trace."""
    params = SamplingParams(
        temperature=0.9, top_p=0.95, presence_penalty=0.8, repetition_penalty=1.3, logit_bias={4: 0.7}, bad_words_token_ids=((3, 1),), min_tokens=1
    )
    num_sequences, prompt = 4_000, [0, START]
    histories: list[list[int]] = [[] for _ in range(num_sequences)]
    slots = [
        SlotSampling(params, key=key, vocab_size=VOCAB, token_ids=prompt, num_prompt_tokens=len(prompt), eos_token_ids=(0,))
        for key in range(num_sequences)
    ]
    num_accepted = 0
    while unfinished := [i for i, history in enumerate(histories) if len(history) < 2]:
        segments, contexts = [], []
        for i in unfinished:
            drafts = ((i % 4 + 1), 4 - i % 3)
            segments.append(SegmentRows(slots[i], len(prompt) + len(histories[i]), drafts))
            contexts += [(prompt + histories[i])[-1], *drafts]
        for i, result in zip(unfinished, sample_segments(TARGET[contexts], segments), strict=True):
            num_accepted += result.num_accepted
            histories[i] += result.token_ids
            slots[i].append(result.token_ids)
    assert num_accepted > 500
    probs = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for first, p_first in enumerate(reference.distribution(reference.process(TARGET[START].tolist(), params, prompt, [], (0,)), params)):
        if p_first > 0:
            second = reference.process(TARGET[first].tolist(), params, prompt, [first], (0,))
            probs[first] = p_first * torch.tensor(reference.distribution(second, params))
    counts = torch.zeros(VOCAB, VOCAB)
    for history in histories:
        counts[history[0], history[1]] += 1
    assert _chi_square(counts, probs) > 1e-4
