"""What the KV cache gets of a device, from numbers to numbers; readings from a device that is made up; errors where memory ends."""

import logging
from types import SimpleNamespace

import pytest
import torch

from specwire.engine import memory
from specwire.engine.kv_cache import KVCache
from specwire.engine.memory import DeviceMemory, MemoryNeeds, decide_kv_cache_bytes, kv_cache_bytes, log_memory, measure_needs, read_device_memory
from specwire.engine.models.config import ModelConfig
from specwire.engine.out_of_memory import explain_out_of_memory, format_bytes
from specwire.errors import ResourceExhaustedError
from tests.engine.test_config import BASE

GIB = 1 << 30
CONTEXT = memory._CONTEXT_BYTES
LLAMA_8B = MemoryNeeds(weights=16 * GIB, buffers=GIB, activations=GIB, graphs=2 * GIB)
NOTHING = MemoryNeeds(0, 0, 0, 0)
CONFIG = ModelConfig.from_dict(BASE)


@pytest.mark.parametrize(
    ("needs", "device", "utilization", "expected"),
    [
        # Alone on a device: the share, less the context, everything that is needed, and 1% for fragments.
        (NOTHING, DeviceMemory(100 * GIB, 100 * GIB), 1.0, 99 * GIB - CONTEXT),
        (NOTHING, DeviceMemory(100 * GIB, 100 * GIB), 0.5, int(49.5 * GIB) - CONTEXT),
        (LLAMA_8B, DeviceMemory(140 * GIB, 123 * GIB), 0.9, 126 * GIB - CONTEXT - 20 * GIB - int(1.26 * GIB)),
        # Shares of two processes leave each other alone.
        (LLAMA_8B, DeviceMemory(140 * GIB, 90 * GIB), 0.6, 84 * GIB - CONTEXT - 20 * GIB - int(0.84 * GIB)),
        # Another process holds more than it should: what is free decides, and the weights are loaded already.
        (LLAMA_8B, DeviceMemory(140 * GIB, 30 * GIB), 0.9, 30 * GIB - 4 * GIB - int(1.26 * GIB)),
        # Too little: negative.
        (LLAMA_8B, DeviceMemory(24 * GIB, 7 * GIB), 0.5, 12 * GIB - CONTEXT - 20 * GIB - int(0.12 * GIB)),
    ],
)
def test_what_the_kv_cache_gets(needs: MemoryNeeds, device: DeviceMemory, utilization: float, expected: int) -> None:
    assert kv_cache_bytes(needs, device, utilization) == pytest.approx(expected, abs=2)


def test_a_share_that_is_too_small_says_what_it_is_spent_on() -> None:
    device = DeviceMemory(24 * GIB, 7 * GIB)
    with pytest.raises(ResourceExhaustedError) as caught:
        decide_kv_cache_bytes(LLAMA_8B, device, 0.5, 1 << 20)
    text = str(caught.value)
    for part in (
        "gpu_memory_utilization 0.5 is 12.0 GiB of 24.0 GiB",
        "needs 20.7 GiB (weights 16.0 GiB, buffers 1.0 GiB, the largest round 1.0 GiB, graphs 2.0 GiB, context and fragments 763 MiB)",
        "raise gpu_memory_utilization, lower max_num_seqs, max_num_batched_tokens or num_speculative_tokens, or set kv_cache_memory",
    ):
        assert part in text
    assert "other processes" not in text
    with pytest.raises(ResourceExhaustedError, match=r"only 3\.0 GiB are free: other processes hold more"):
        decide_kv_cache_bytes(LLAMA_8B, DeviceMemory(140 * GIB, 3 * GIB), 0.9, 1 << 20)


def test_memory_that_others_took_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    free = decide_kv_cache_bytes(LLAMA_8B, DeviceMemory(140 * GIB, 123 * GIB), 0.9, 1 << 20)
    decide_kv_cache_bytes(NOTHING, DeviceMemory(140 * GIB, 139 * GIB), 1.0, 1 << 20)
    assert not caplog.records, "a context of 1 GiB is no other process"
    less = decide_kv_cache_bytes(LLAMA_8B, DeviceMemory(140 * GIB, 60 * GIB), 0.9, 1 << 20)
    assert less < free
    assert "the KV cache gets 54.7 GiB instead of 104 GiB, and of the device only 60.0 GiB are free" in caplog.text


class FakeDevice:
    """Counts like torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated, self.peak, self.total = 5000, 0, 100_000
        self.is_open = 0
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def take(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def memory_reserved(self, device: torch.device) -> int:
        return self.allocated + 700

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.memory_reserved(device), self.total

    def synchronize(self, device: torch.device) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


@pytest.mark.parametrize("num_graphs", [0, 3])
def test_needs_are_what_a_runner_took(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, num_graphs: int) -> None:
    class Runner:
        def __init__(self, kv_cache: object) -> None:
            self.num_graphs = num_graphs
            device.take(10_000)  # once, and given back: no peak of the largest round
            device.allocated -= 9_000

        def warm_up(self) -> None:
            device.take(400)
            device.allocated -= 300
            device.take(150)

    made = []
    monkeypatch.setattr(memory, "KVCache", lambda config, num_blocks, dtype, where, features: made.append(num_blocks))
    model = SimpleNamespace(device=torch.device("cuda"), config=None, dtype=torch.bfloat16)
    needs = measure_needs(model, Runner)  # type: ignore[arg-type]
    assert made == [1]
    assert (needs.weights, needs.buffers, needs.activations) == (5000, 1000, 400)
    assert needs.graphs == (400 + 3 * memory._GRAPH_BYTES if num_graphs else 0)
    assert read_device_memory(model.device) == DeviceMemory(100_000, 100_000 - device.allocated - 700)


def test_the_table_accounts_for_everything(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = KVCache(CONFIG, 5, torch.bfloat16)
    device.allocated += 6 * KVCache.bytes_per_block(CONFIG, torch.bfloat16) + 2000
    device.total = 1 << 21
    log_memory({"weights": 5000, "logits": 1500}, torch.device("cuda:0"), cache)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":", 2)[2].split()[:2] for line in lines][:2] == [["4.9", "KiB"], ["1.5", "KiB"]]
    kv_bytes = format_bytes(6 * KVCache.bytes_per_block(CONFIG, torch.bfloat16))
    assert f"{kv_bytes}  KV cache: 5 blocks of 16 tokens, and a scratch block" in lines[2]
    assert "1.2 KiB  graphs, scratch, and what the allocator keeps" in lines[3]  # 2000 + 700 - 1500
    assert "free of 2.0 MiB" in lines[4]
    assert len(lines) == 5


# --- errors -----------------------------------------------------------------------------------------------------------

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.20 GiB is free. Process 7 has ..."


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.cuda.OutOfMemoryError(CUDA), r"2\.00 GiB more were asked for"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
            "4096 bytes more",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), "CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "CUBLAS_STATUS_ALLOC_FAILED"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_out_of_memory_is_explained(error: Exception, reason: str) -> None:
    message = rf"^cannot do it on cpu: out of memory \(.*{reason}.*; .* are free\); lower x$"
    with pytest.raises(ResourceExhaustedError, match=message) as caught, explain_out_of_memory("do it", "cpu", "lower x"):
        raise error
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_what_is_free_on_a_gpu_is_named(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    message = r"on cuda:0: .*; 92\.1 KiB of 97\.7 KiB are free, this process holds 5\.6 KiB\); lower x"
    with pytest.raises(ResourceExhaustedError, match=message), explain_out_of_memory("do it", "cuda:0", "lower x"):
        raise torch.cuda.OutOfMemoryError(CUDA)


def test_a_gpu_without_room_for_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with (
        pytest.raises(ResourceExhaustedError, match="CUDA error: out of memory; too little is free to ask how much"),
        explain_out_of_memory("x", "cuda", "y"),
    ):
        fail()


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_out_of_memory("do it", "cpu", "lower x"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (150 << 20, "150 MiB"),
        (-3 * GIB, "-3.0 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_bytes_are_readable(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
