"""Ties go to the lowest id, whatever the shape."""

import pytest
import torch

from specwire.engine.sampling.ordering import row_max, top_ordered


@pytest.mark.parametrize("size", [1, 5, 128, 130, 1024, 49_152])
def test_row_max_finds_the_lowest_of_equal_ids(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(0, 4, (20, size), generator=generator).float()
    values, token_ids = row_max(logits)
    for row in range(20):
        best = max(logits[row].tolist())
        assert values[row].item() == best
        assert token_ids[row].item() == logits[row].tolist().index(best)


@pytest.mark.parametrize("size", [100, 256])
@pytest.mark.parametrize("position", [0, 37, 99])
def test_row_max_shows_nan_and_infinities(size: int, position: int) -> None:
    logits = torch.zeros(4, size)
    logits[0, position] = torch.nan
    logits[1] = -torch.inf
    logits[2, position] = torch.inf
    values, token_ids = row_max(logits)
    assert values.isfinite().tolist() == [False, False, False, True]
    assert all(0 <= token_id < size for token_id in token_ids.tolist())


@pytest.mark.parametrize("num", [1, 2, 7, 31, 32, 63, 64, 100])
@pytest.mark.parametrize("levels", [1, 3, 1000, 10**6])
@pytest.mark.parametrize("size", [65, 4096])
def test_top_ordered(num: int, levels: int, size: int) -> None:
    logits = torch.randint(0, levels, (20, size), generator=torch.Generator().manual_seed(num)).float()
    values, token_ids = top_ordered(logits, num)
    for row, expected in enumerate(logits.tolist()):
        order = sorted(range(size), key=lambda v, expected=expected: (-expected[v], v))[:num]
        assert token_ids[row].tolist() == order
        assert values[row].tolist() == [expected[v] for v in order]


def test_top_ordered_with_masked_tokens() -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [9, 30, 4]] = torch.tensor([1.0, 2.0, 1.0])
    values, token_ids = top_ordered(logits, 10)
    assert token_ids[0, :3].tolist() == [30, 4, 9]
    assert values[0].tolist() == [2.0, 1.0, 1.0] + [-torch.inf] * 7
