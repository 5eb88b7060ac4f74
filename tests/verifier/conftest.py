"""Fixtures of the verifier's tests: a tiny model, rounds on it in process, and the same verifier on a socket."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from specwire.engine.models.decoder import Decoder
from tests.verifier.harness import PROMPT, Rounds, Served, ids, make_verifier, serve, tiny_model
from verifier_svc.verifier import Verifier


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_model()


@pytest.fixture(params=["model", "rounds"])
def make(request: pytest.FixtureRequest) -> Callable[..., Verifier]:
    """`make_verifier` with either executor."""
    return partial(make_verifier, executor=request.param)


@pytest.fixture
def rounds(model: Decoder, make: Callable[..., Verifier]) -> Rounds:
    return Rounds(make(model))


@pytest.fixture
async def served(model: Decoder, socket_dir: Path) -> AsyncIterator[Served]:
    async with serve(make_verifier(model), socket_dir) as served:
        yield served


@pytest.fixture
def truth(model: Decoder) -> list[int]:
    """What the model says after PROMPT, greedily."""
    return ids(model, PROMPT, 12)
