"""Fixtures that every test may use."""

import importlib.util
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Models are tiny here: threads bring them nothing, and take the cores from the tests beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Those that a test asks for wait for one another; at full speed, they would keep the cores from the one that they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Shells start what runs in the background deaf to Ctrl-C, and nohup to the end of a terminal; what tests start and signal would inherit that.
# A handler is not inherited: programs begin with the signal's own meaning.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

if not Path("/dev/nvidiactl").exists():
    # Triton's kernels run in its interpreter where there is no GPU. It has to know when it is imported, and transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no CUDA device; torch is imported only if there is such a test."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """A test that sets up the log of a program leaves no handler, whose stream is closed after it, to the others."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def write_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes configuration files into a fresh working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECWIRE_CONFIG", raising=False)

    def write(text: str | bytes, name: str = "specwire.yaml") -> Path:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        return Path(name)

    return write


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A fresh folder with a short path for Unix sockets: their addresses end at 107 bytes, and `tmp_path` can be longer."""
    path = Path(tempfile.mkdtemp(prefix="sw-"))
    yield path
    shutil.rmtree(path)
