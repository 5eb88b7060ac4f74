"""One token a row: against the reference, at ties, with bad rows, and however the noise is made."""

import itertools
import math

import pytest
import torch

from specwire.engine.sampling.philox import GUMBEL_MAX, GUMBEL_MIN, Stream, gumbel, key_to_int64, noise_words
from specwire.engine.sampling.sampler import SampleMargins, SamplerRows, sample_greedy, sample_rows
from specwire.sampling_params import SamplingParams
from tests.engine.sampling import reference

PARAMS = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature, top_p, top_k, min_p in itertools.product((0.0, 9e-6, 0.2, 1.0, 3.0), (1.0, 0.8), (0, -1, 1, 3), (0.0, 0.1))
]


@pytest.mark.parametrize("vocab_size", [1, 5, 130, 512])
def test_rows_equal_the_reference(vocab_size: int) -> None:
    logits = 4 * torch.randn(len(PARAMS), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    keys = [(row * 0x9E3779B97F4A7C15) % 2**64 for row in range(len(PARAMS))]
    rows = SamplerRows.build(PARAMS, keys, range(len(PARAMS)), [row % 3 for row in range(len(PARAMS))])
    sampled = sample_rows(logits, rows)
    assert not sampled.is_bad.any()
    for row, params in enumerate(PARAMS):
        assert sampled.token_ids[row] == reference.sample(logits[row].tolist(), params, keys[row], row, row % 3), params


@pytest.mark.parametrize("temperature", [0.05, 0.2, 0.5, 1.0])
def test_noise_for_few_tokens_and_for_all_gives_the_same_token(temperature: float) -> None:
    """Low temperatures take the sparse way, high ones the dense one; both must find the winner among all noise."""
    num_rows, vocab_size = 64, 4096
    logits = 2.5 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3))
    rows = SamplerRows.build([SamplingParams(temperature=temperature)] * num_rows, range(num_rows), range(num_rows), [0] * num_rows)
    noise = gumbel(noise_words(rows.keys, rows.indices, rows.choices, Stream.TARGET, vocab_size))
    assert torch.equal(sample_rows(logits, rows).token_ids, (logits + temperature * noise).argmax(dim=1))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_token_far_behind_wins_by_its_noise(temperature: float) -> None:
    """The sparse way leaves out no token that can win: here the one with the most noise beats the one with the least."""
    vocab_size = 49_152
    rows = SamplerRows.build([SamplingParams(temperature=temperature)] * 8, range(8), [0] * 8, [0] * 8)
    noise = gumbel(noise_words(rows.keys, rows.indices, rows.choices, Stream.TARGET, vocab_size))
    (most, winners), (least, leaders) = noise.max(dim=1), noise.min(dim=1)
    logits = torch.full((8, vocab_size), -1000.0)
    logits.scatter_(1, leaders.unsqueeze(1), 0.0)
    logits.scatter_(1, winners.unsqueeze(1), (0.999 * temperature * (least - most)).unsqueeze(1))
    assert (most - least).max() > 13
    assert torch.equal(sample_rows(logits, rows).token_ids, winners)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1e-5), SamplingParams(temperature=1e-5, top_k=5), SamplingParams(temperature=1e-5, min_p=0.5)]
)
@pytest.mark.parametrize("num_equal", [3, 200])
def test_equal_scores_go_to_the_lowest_id(params: SamplingParams, num_equal: int) -> None:
    """At a million a float32 does not see the noise of so low a temperature."""
    logits = torch.zeros(5, 256)
    logits[:, 256 - num_equal :] = 1e6
    rows = SamplerRows.build([params] * 5, range(5), [0] * 5, [0] * 5)
    assert sample_rows(logits, rows).token_ids.tolist() == [256 - num_equal] * 5


@pytest.mark.parametrize("params", PARAMS)
def test_other_rows_do_not_matter(params: SamplingParams) -> None:
    logits = torch.randn(len(PARAMS), 257, generator=torch.Generator().manual_seed(2))
    together = sample_rows(logits, SamplerRows.build(PARAMS, [1] * len(PARAMS), range(len(PARAMS)), [0] * len(PARAMS)))
    row = PARAMS.index(params)
    alone = sample_rows(logits[row : row + 1], SamplerRows.build([params], [1], [row], [0]))
    assert alone.token_ids.item() == together.token_ids[row].item()


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1e-6), SamplingParams(temperature=1.0, top_k=1)])
def test_equal_logits_go_to_the_lowest_id(params: SamplingParams) -> None:
    logits = torch.zeros(1, 300)
    logits[0, [299, 44, 200]] = 1.0
    assert sample_rows(logits, SamplerRows.build([params], [0], [0], [0])).token_ids.item() == 44


def test_temperatures_below_the_epsilon_are_greedy() -> None:
    logits = torch.zeros(1000, 10)
    for temperature, num_distinct in ((0.0, 1), (0.99e-5, 1), (1.01e-5, 10)):
        rows = SamplerRows.build([SamplingParams(temperature=temperature)] * 1000, range(1000), [0] * 1000, [0] * 1000)
        assert len(set(sample_rows(logits, rows).token_ids.tolist())) == num_distinct


BAD_ROWS = {
    "one NaN": lambda row: row.index_fill_(0, torch.tensor([5]), torch.nan),
    "all NaN": lambda row: row.fill_(torch.nan),
    "nothing left": lambda row: row.fill_(-torch.inf),
    "+inf": lambda row: row.index_fill_(0, torch.tensor([5]), torch.inf),
}


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=5, min_p=0.01)]
)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_bad_rows_are_flagged_and_others_untouched(bad: str, params: SamplingParams) -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    rows = SamplerRows.build([params] * 5, [9] * 5, range(5), [0] * 5)
    good = sample_rows(logits, rows)
    BAD_ROWS[bad](logits[3])
    sampled = sample_rows(logits, rows, margins=True)
    assert sampled.is_bad.tolist() == [False, False, False, True, False]
    assert sampled.token_ids[[0, 1, 2, 4]].tolist() == good.token_ids[[0, 1, 2, 4]].tolist()
    assert 0 <= sampled.token_ids[3] < 64
    assert sample_greedy(logits).is_bad.tolist() == sampled.is_bad.tolist()


def test_all_rows_bad() -> None:
    sampled = sample_rows(
        torch.full((2, 8), torch.nan), SamplerRows.build([SamplingParams(temperature=1.0)] * 2, [0, 1], [0, 0], [0, 0]), margins=True
    )
    assert sampled.is_bad.all()


@pytest.mark.parametrize("params", PARAMS)
def test_margins(params: SamplingParams) -> None:
    logits = 2 * torch.randn(1, 64, generator=torch.Generator().manual_seed(8))
    sampled = sample_rows(logits, SamplerRows.build([params], [3], [17], [1]), margins=True)
    z = logits[0].tolist()
    candidates = range(64) if params.is_greedy else reference.support(z, params)
    scores = sorted((z[v] + (0 if params.is_greedy else params.temperature * reference.noise(3, 17, 1, v)) for v in candidates), reverse=True)
    [margins] = sampled.margins
    assert margins.top2 == pytest.approx(scores[0] - scores[1] if len(scores) > 1 else math.inf, abs=2e-5)
    filtered = not params.is_greedy and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
    assert (margins.border < math.inf) == filtered


@pytest.mark.parametrize(
    ("top2", "border", "expected"),
    [(1e-3, 1.0, False), (0.9e-4, 1.0, True), (1e-3, 0.9e-5, True), (1e-3, 1.1e-5, False), (math.inf, math.inf, False)],
)
def test_near_ties(top2: float, border: float, expected: bool) -> None:
    assert SampleMargins(top2, border).is_near_tie == expected


def test_unsigned_keys_are_kept() -> None:
    rows = SamplerRows.build([SamplingParams()] * 2, [2**64 - 1, 2**63 - 1], [0, 0], [0, 0])
    assert rows.keys.tolist() == [key_to_int64(2**64 - 1), 2**63 - 1] == [-1, 2**63 - 1]


@pytest.mark.parametrize("num_positions", [1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_a_dominant_logit_always_wins(num_positions: int) -> None:
    """At a gap of 24 another token wins once in e^24 / V = 200,000 positions, so that one surprise shows noise with too
    heavy a tail (a uniform that rounds to 0 or 1). The gap is small enough for all noise to be made.
    """
    vocab_size, chunk = 128_256, 100
    logits = torch.zeros(1, vocab_size)
    logits[0, 77_777] = 24.0
    assert GUMBEL_MAX - GUMBEL_MIN > 24.0
    surprises = 0
    for start in range(0, num_positions, chunk):
        rows = SamplerRows.build([SamplingParams(temperature=1.0)] * chunk, [1234] * chunk, range(start, start + chunk), [0] * chunk)
        surprises += int((sample_rows(logits.expand(chunk, -1), rows).token_ids != 77_777).sum())
    assert surprises == 0
