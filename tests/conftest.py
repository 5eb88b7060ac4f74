"""Fixtures that every test may use."""

import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Models are tiny here: threads bring them nothing, and take the cores from the tests beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

for number in (signal.SIGINT, signal.SIGHUP):
    # Shells start what runs in the background deaf to Ctrl-C, nohup what outlives its terminal. The programs that tests start and signal would
    # inherit that, but not a handler: this process stays as deaf as it was.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

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


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A fresh folder with a short path for Unix sockets: their addresses end at 107 bytes, and `tmp_path` can be longer."""
    path = Path(tempfile.mkdtemp(prefix="sw-"))
    yield path
    shutil.rmtree(path)
