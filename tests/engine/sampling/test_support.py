"""min-p, then top-k, then top-p, against the reference and by hand."""

import itertools
import math

import pytest
import torch

from specwire.engine.sampling.support import Filters, Support, filtered_support
from specwire.sampling_params import SamplingParams
from tests.engine.sampling.reference import support

OFF = 2**31


def _filters(params: list[SamplingParams]) -> Filters:
    return Filters(
        temperatures=torch.tensor([p.temperature for p in params]),
        top_ks=torch.tensor([p.top_k or OFF for p in params]),
        top_ps=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_ps=torch.tensor([p.min_p for p in params], dtype=torch.float64),
    )


def _ids(result: Support, row: int) -> list[int]:
    size = int(result.sizes[row])
    assert (result.logits[row, :size] > -torch.inf).all()
    assert (result.logits[row, size:] == -torch.inf).all()
    return result.token_ids[row, :size].tolist()


PARAMS = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature, top_p, top_k, min_p in itertools.product((0.3, 1.0, 2.5), (1.0, 0.9, 0.35), (0, 1, 2, 40, 5000), (0.0, 0.02, 0.5))
]


@pytest.mark.parametrize("vocab_size", [3, 97, 2048])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_every_combination_equals_the_reference(vocab_size: int, spread: float) -> None:
    logits = spread * torch.randn(len(PARAMS), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    result = filtered_support(logits, _filters(PARAMS))
    for row, params in enumerate(PARAMS):
        assert _ids(result, row) == support(logits[row].tolist(), params), params


@pytest.mark.parametrize(
    ("probs", "params", "expected"),
    [
        ((0.5, 0.5), {"top_p": 0.5}, [0]),  # mass is reached exactly; of equal tokens the lower id
        ((0.5, 0.5), {"top_p": 0.5001}, [0, 1]),
        ((0.2, 0.4, 0.4), {"top_p": 0.01}, [1]),  # never empty
        ((0.25, 0.5, 0.25), {"top_k": 2}, [1, 0]),
        ((0.25, 0.25, 0.25, 0.25), {"top_k": 3}, [0, 1, 2]),
        ((0.1, 0.5, 0.3, 0.1), {"min_p": 0.59}, [1, 2]),
        ((0.1, 0.5, 0.3, 0.1), {"min_p": 0.61}, [1]),
        ((0.1, 0.45, 0.45), {"min_p": 1.0}, [1, 2]),
        ((0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.55}, [0]),  # 0.4 / 0.7 of what top-k left
        ((0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.6}, [0, 1]),
        ((0.4, 0.3, 0.2, 0.1), {"min_p": 0.6, "top_p": 0.55}, [0]),  # 0.4 / 0.7 of what min-p left
        ((0.4, 0.3, 0.2, 0.1), {"min_p": 0.6, "top_k": 3, "top_p": 0.58}, [0, 1]),
    ],
)
def test_by_hand(probs: tuple[float, ...], params: dict[str, float], expected: list[int]) -> None:
    result = filtered_support(torch.tensor([probs]).log(), _filters([SamplingParams(temperature=1.0, **params)]))  # type: ignore[arg-type]
    assert _ids(result, 0) == expected


@pytest.mark.parametrize("num_candidates", [1, 2, 5, 64, 1000])
def test_the_number_of_candidates_does_not_matter(num_candidates: int) -> None:
    logits = torch.randint(0, 30, (len(PARAMS), 1024), generator=torch.Generator().manual_seed(1)).float() / 7
    wanted = filtered_support(logits, _filters(PARAMS), num_candidates=1024)
    result = filtered_support(logits, _filters(PARAMS), num_candidates=num_candidates)
    for row in range(len(PARAMS)):
        assert _ids(result, row) == _ids(wanted, row), PARAMS[row]


def test_masked_tokens_are_never_in_a_support() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 200]] = torch.tensor([0.0, 1.0])
    for params in (
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=1.0, top_p=0.9999),
        SamplingParams(temperature=1.0, min_p=1e-9),
    ):
        assert _ids(filtered_support(logits, _filters([params])), 0) == [200, 7]


@pytest.mark.parametrize(
    ("params", "expected"),
    [  # probabilities 0.4, 0.3, 0.2, 0.1 at T = 1
        ({"top_p": 0.71}, 0.01),  # mass of two tokens is 0.7
        ({"top_p": 0.69}, 0.01),
        ({"top_k": 2}, math.log(0.3 / 0.2)),
        ({"top_k": 4}, math.inf),  # cuts nothing
        ({"min_p": 0.5}, 0.0),
        ({"min_p": 0.55}, math.log(0.55 / 0.5)),
        ({"min_p": 0.7, "top_k": 2}, math.log(0.75 / 0.7)),  # min-p had left two
    ],
)
def test_borders(params: dict[str, float], expected: float) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    result = filtered_support(logits, _filters([SamplingParams(temperature=1.0, **params)]), with_borders=True)  # type: ignore[arg-type]
    assert result.borders is not None
    assert result.borders.item() == pytest.approx(expected, abs=2e-6)


def test_a_near_tie_across_the_top_p_border_is_a_border() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0 - 2e-7, 0.0]])
    result = filtered_support(logits, _filters([SamplingParams(temperature=1.0, top_p=0.7)]), with_borders=True)
    assert _ids(result, 0) == [0, 1]
    assert result.borders is not None
    assert result.borders.item() < 1e-6
