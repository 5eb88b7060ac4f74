"""Services and references that the tests of this folder share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specwire.config import DEFAULT_MODEL
from specwire.engine.checkpoint import resolve_model

from .matrix import MAX_MODEL_LEN, fleet_configs
from .reference import OneTokenLoop
from .stack import NUM_THREADS, Fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Verifiers and drafters on the default model, as child processes."""
    folder = Path(tempfile.mkdtemp(prefix="sw-"))
    fleet = Fleet(folder, fleet_configs())
    yield fleet
    fleet.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def target() -> OneTokenLoop:
    """The reference on the default model."""
    return OneTokenLoop(resolve_model(DEFAULT_MODEL), MAX_MODEL_LEN, NUM_THREADS)
