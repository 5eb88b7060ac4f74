"""When requests arrive: drawn before the run from one seeded generator, so that nothing that happens in it moves them."""

import math

import numpy as np

from specwire.errors import InvalidArgumentError

_STREAM = 1  # arrivals and prompts come from streams of their own: changing one leaves the other as it was


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the first arrival to each, ascending.

    Gaps are gamma-distributed with mean 1/rate and shape `burstiness`, as in `vllm bench serve`: 1 makes a Poisson process, less makes
    bursts, more makes them even.

    Args:
        rate: requests a second; infinite = all at once.

    Raises:
        InvalidArgumentError: a rate or burstiness that is not positive.
    """
    if not rate > 0:
        raise InvalidArgumentError(f"--request-rate is {rate}, but must be above 0 requests a second; inf sends all at once")
    if not 0 < burstiness < math.inf:
        raise InvalidArgumentError(f"--burstiness is {burstiness}, but must be a positive number; 1 makes a Poisson process")
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng([seed, _STREAM]).gamma(burstiness, 1 / (rate * burstiness), size=max(0, num_requests - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:num_requests]
