"""Noise words, bit by bit, and what is made of them."""

import math

import pytest
import torch
from scipy import stats

from specwire.engine.sampling.philox import GUMBEL_MAX, GUMBEL_MIN, Stream, gumbel, key_to_int64, noise_words, noise_words_at, uniforms
from tests.engine.sampling.reference import philox


def _rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _words(key: int, index: int, choice: int, stream: Stream, vocab_size: int) -> list[int]:
    return noise_words(_rows(key_to_int64(key)), _rows(index), _rows(choice), stream, vocab_size)[0].tolist()


def test_golden_words_of_key_zero() -> None:
    assert _words(0, 0, 0, Stream.TARGET, 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_golden_words_and_noise_of_seed_7() -> None:
    words = noise_words(_rows(7), _rows(12), _rows(0), Stream.TARGET, 8)
    assert [f"{word:08x}" for word in words[0].tolist()] == [
        "a3f789ba",
        "04114c5f",
        "5f10d301",
        "9c8bee47",
        "ea484af6",
        "be988183",
        "8aa2bec7",
        "14186192",
    ]
    expected = torch.tensor([[-0.02277, 4.13413, 0.76748, 0.05605, -0.90302, -0.31085, 0.24860, 2.50410]])
    torch.testing.assert_close(gumbel(words), expected, atol=6e-6, rtol=0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with the authors' library (Random123, kat_vectors)
        ((0xFFFFFFFF,) * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0_A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_reference_gives_the_published_answers(counter: tuple[int, ...], key: int, expected: list[int]) -> None:
    assert philox(counter, key) == expected


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 0x9E3779B97F4A7C15, 2**64 - 1])
def test_any_unsigned_64_bit_key(key: int) -> None:
    expected = [word for block in range(3) for word in philox([block, 2**31 + 5, 127, 3], key)]
    assert _words(key, 2**31 + 5, 127, Stream.RESIDUAL, 11) == expected[:11]


@pytest.mark.parametrize("key", [-1, 2**64])
def test_other_keys_are_refused(key: int) -> None:
    with pytest.raises(AssertionError, match=str(key)):
        key_to_int64(key)


def test_rows_and_chosen_tokens_agree_with_the_full_table() -> None:
    keys, indices, choices = _rows(3, key_to_int64(2**64 - 9), 3), _rows(5, 6, 7), _rows(0, 1, 2)
    full = noise_words(keys, indices, choices, Stream.TARGET, 49_153)
    assert full.shape == (3, 49_153)
    token_ids = torch.randint(0, 49_153, (3, 200), generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise_words_at(keys, indices, choices, Stream.TARGET, token_ids), full.gather(1, token_ids))
    for row in range(3):
        key = int(keys[row]) % 2**64
        assert full[row, 49_152].item() == philox([12_288, int(indices[row]), int(choices[row]), 0], key)[0]


def test_streams_indices_choices_and_keys_give_other_words() -> None:
    variants = [(7, 12, 0, Stream.TARGET), (8, 12, 0, Stream.TARGET), (7, 13, 0, Stream.TARGET), (7, 12, 1, Stream.TARGET)]
    variants += [(7, 12, 0, stream) for stream in Stream if stream != Stream.TARGET]
    assert len({tuple(_words(*variant, 64)) for variant in variants}) == len(variants) == 8


def test_noise_is_finite_at_the_extreme_words() -> None:
    words = torch.tensor([0, 1, 2**24 + 1, 2**32 - 2**8 - 1, 2**32 - 2**7, 2**32 - 1])
    noise = gumbel(words)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert noise.diff().le(0).all()  # falls with the word
    assert math.isclose(noise[0].item(), GUMBEL_MAX, rel_tol=1e-6)
    assert math.isclose(noise[-1].item(), GUMBEL_MIN, rel_tol=1e-6)


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel(noise_words(torch.arange(100), torch.arange(100), torch.zeros(100, dtype=torch.int64), Stream.TARGET, 2_000)).flatten().double()
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > 1e-3


@pytest.mark.parametrize("stream", [Stream.ACCEPT, Stream.RESIDUAL, Stream.SYNTHETIC])
def test_uniforms(stream: Stream) -> None:
    indices = torch.arange(20_000)
    zeros = torch.zeros_like(indices)
    draws = uniforms(zeros + 5, indices, zeros, stream)
    assert draws.dtype == torch.float64
    assert draws[17].item() == (philox([0, 17, 0, int(stream)], 5)[0] + 0.5) / 2**32
    assert draws.min() > 0
    assert draws.max() < 1
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3
