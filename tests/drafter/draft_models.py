"""The draft model of the tests, and what is asked of it."""

import random
from collections.abc import Callable

from drafter_svc.draft_model import DraftModel
from specwire.sampling_params import SamplingParams
from tests.drafter.target import VOCAB_SIZE, tiny_model

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8)
HOT = SamplingParams(temperature=1.5)
MODEL = tiny_model()
Make = Callable[..., DraftModel]
"""Makes a drafter; see the fixture `make`."""


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def catch_up(method: DraftModel, budget: int = 64) -> None:
    """All of its background work."""
    while method.catch_up(budget):
        pass
