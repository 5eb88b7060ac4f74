"""The target and its heads, written once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.heads.checkpoints import WRITERS, Checkpoint
from tests.heads.target import Target, make_target


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that share work this small wait for one another longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """By the names of their writers."""
    folder: Path = tmp_path_factory.mktemp("heads")
    return {name: write(folder / name) for name, write in WRITERS.items()}
