"""How drafts are accepted, as speculative_config says it."""

import pytest

from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.speculative_acceptance import check_rates
from specwire.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("length", "num_tokens", "rates"),
    [
        (2.6, 3, (1, 0.6, 0)),
        (1, 3, (0, 0, 0)),
        (4, 3, (1, 1, 1)),
        (2, 3, (1, 0, 0)),
        (3.5, 4, (1, 1, 0.5, 0)),
        (1.875, 3, (0.875, 0, 0)),
        (1.5, 1, (0.5,)),
    ],
)
def test_rates_of_a_length(length: float, num_tokens: int, rates: tuple[float, ...]) -> None:
    config = SpeculativeConfig(num_speculative_tokens=num_tokens, rejection_sample_method="synthetic", synthetic_acceptance_length=length)
    assert config.acceptance_rates() == pytest.approx(rates)
    assert 1 + sum(config.acceptance_rates()) == pytest.approx(length)
    check_rates(config.acceptance_rates(), num_tokens)


def test_given_rates_are_kept() -> None:
    config = SpeculativeConfig.from_dict(
        {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.5, 0]}
    )
    assert config.acceptance_rates() == (0.9, 0.5, 0)


def test_rejection_methods_that_are_not_built_are_named() -> None:
    with pytest.raises(UnsupportedError, match="rejection_sample_method 'block' is not built; use one of strict, probabilistic, synthetic"):
        SpeculativeConfig.from_dict({"rejection_sample_method": "block"})


def test_the_ratio_test_needs_drafts_that_nobody_chose() -> None:
    values = {"rejection_sample_method": "probabilistic", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 64, 0]]}
    assert SpeculativeConfig.from_dict(values).rejection_sample_method == "probabilistic"
    with pytest.raises(InvalidArgumentError, match="use strict, or leave enable_adaptive_verification out"):
        SpeculativeConfig.from_dict(values | {"enable_adaptive_verification": True})
    with pytest.raises(InvalidArgumentError, match="need rejection_sample_method synthetic"):
        SpeculativeConfig.from_dict(values | {"synthetic_acceptance_length": 2})
