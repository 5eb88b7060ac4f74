"""What tests of checkpoints share."""

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where conversions and hashes are kept: a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specwire"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    from tests.engine.tiny_models import save_tiny_model  # brings torch, which not all tests below this folder need

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder
