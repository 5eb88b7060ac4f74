"""Features in the memory of other processes and of GPUs, opened and read."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from specwire.engine.features.device import DeviceMemory, open_pages
from specwire.engine.features.pages import FeaturePages
from specwire.engine.features.pool import FeaturePool
from specwire.errors import UnavailableError
from tests.engine.features.sources import eagle_source
from tests.verifier.harness import tiny_config

SOURCE = eagle_source(8, dtype=torch.bfloat16)


NUM_BLOCKS = 6


@pytest.mark.parametrize(("uuid", "waits"), [("GPU-1", True), ("GPU-2", False)], ids=["the same GPU", "another one"])
def test_pages_are_opened_on_the_drafters_own_gpu(monkeypatch, uuid, waits):
    """Also those of another GPU, which this process need not see; what belongs to that one alone is left out."""
    opened = []

    def new_shared(*given):
        opened.append(given)
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(new_shared), raising=False)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(
        is_available=lambda: True, init=lambda: None, current_device=lambda: 0, get_device_properties=lambda index: SimpleNamespace(uuid=uuid)
    ))  # fmt: skip
    memory = DeviceMemory("GPU-1", "aa", 64, 8, "bb", 3, "cc", True)
    with pytest.raises(UnavailableError, match=r"GPU-1 can't be opened from cuda:0 \(peer access is not supported\)"):
        open_pages(memory, torch.bfloat16, (4, 8), "cuda")
    with pytest.raises(UnavailableError, match="from cuda:1"):
        open_pages(memory, torch.bfloat16, (4, 8), "cuda:1")
    assert opened == [(index, b"\xaa", 64, 8, b"\xbb", 3, b"\xcc", waits) for index in (0, 1)]


GPU_READER = """
import sys, torch
from specwire.engine.features.device import DeviceMemory, open_pages
from specwire.engine.features.pool import FeaturePool
pool = FeaturePool.open(sys.argv[1])
[one] = pool.layout.sets
pages = open_pages(DeviceMemory(*one.device_memory), torch.bfloat16, ((pool.layout.num_blocks + 1) * 16, one.bytes_per_token // 2))
print(float(pages.double().sum()), flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("reader_gpu", ["0", "1"])
def test_another_process_reads_pages_on_a_gpu(reader_gpu):
    """Of the GPU that both have, or from one that sees another GPU alone."""
    if int(reader_gpu) >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    source = dataclasses.replace(SOURCE, layer_ids=(0,))
    pages = FeaturePages([source], tiny_config(hidden_size=8), NUM_BLOCKS, 16, torch.bfloat16, "cuda")
    pages.heads[0].pages.copy_(torch.arange((NUM_BLOCKS + 1) * 16 * 8).view(-1, 16, 8) % 50)
    torch.cuda.synchronize()
    pages.share(3)
    assert pages.pool is not None
    found = subprocess.run(
        [sys.executable, "-c", GPU_READER, pages.pool.name], env=os.environ | {"CUDA_VISIBLE_DEVICES": reader_gpu}, stdin=subprocess.DEVNULL,
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert float(found) == pages.heads[0].pages.double().sum().item() > 0


WRITER = """
import sys, numpy as np
from specwire.engine.features.pool import FeaturePool, PoolLayout, PoolSet
pool = FeaturePool.create(PoolLayout.make(2, 4, 16, [PoolSet("a", 6), PoolSet("b", 16)]))
np.frombuffer(pool.pages("b"), dtype=np.uint8)[:] = 77
pool.words[1] = 5
print(pool.name, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def writer() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_memory_of_another_process(writer):
    """It is seen from here, can't be written from here, and outlives its process where it is held."""
    assert writer.stdout is not None
    name = writer.stdout.readline().strip()
    pool = FeaturePool.open(name)
    assert (pool.words.tolist(), set(pool.rows("b").reshape(-1).tolist()), pool.rows("b").shape) == ([0, 5], {77}, (5 * 16, 16))
    assert set(pool.rows("a").reshape(-1).tolist()) == {0}
    with pytest.raises(ValueError, match="read-only"):
        pool.words[0] = 1
    writer.kill()
    writer.wait()
    assert pool.words[1] == 5
    with pytest.raises(UnavailableError):
        FeaturePool.open(name)
