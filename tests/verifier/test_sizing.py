"""What a verifier makes room for on a GPU, with a device that is made up, and what it says where memory ends."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specwire.config import VerifierConfig
from specwire.engine import memory
from specwire.engine.kv_cache import KVCache
from specwire.engine.memory import DeviceMemory, MemoryNeeds
from specwire.errors import ResourceExhaustedError, SpecwireError
from specwire.speculative_config import SpeculativeConfig
from verifier_svc import loading, sizing

from .harness import tiny_config
from .test_loading import CONFIG, config

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.20 GiB is free."
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One that says it is on a GPU of 4 GiB; `made` are its KV caches, `needs` what its runner takes."""
    made: list[int] = []
    model = SimpleNamespace(
        config=tiny_config(), dtype=torch.bfloat16, device=torch.device("cuda"), made=made, needs=MemoryNeeds(64 * MIB, 32 * MIB, 16 * MIB, 8 * MIB)
    )

    class Cache(KVCache):
        def __init__(self, _config: object, num_blocks: int, _dtype: torch.dtype, _device: torch.device) -> None:
            made.append(num_blocks)

    monkeypatch.setattr(sizing, "KVCache", Cache)
    monkeypatch.setattr(sizing, "measure_needs", lambda _model, make_runner: model.needs)
    monkeypatch.setattr(sizing, "read_device_memory", lambda device: DeviceMemory(4096 * MIB, 4000 * MIB))
    return model


@pytest.mark.parametrize(
    ("changes", "num_bytes"),
    [
        ({}, int(0.9 * 4096 * MIB * 0.99) - memory._CONTEXT_BYTES - 120 * MIB),
        ({"gpu_memory_utilization": 0.5}, int(0.5 * 4096 * MIB * 0.99) - memory._CONTEXT_BYTES - 120 * MIB),
        ({"kv_cache_memory": 100 * MIB}, 100 * MIB),
        ({"kv_cache_memory": 100 * MIB, "gpu_memory_utilization": 0.01}, 100 * MIB),
    ],
)
def test_blocks_on_a_gpu(model: SimpleNamespace, changes: dict, num_bytes: int) -> None:
    sizing.make_kv_cache(VerifierConfig(device="cuda", **changes), model)
    bytes_per_block = KVCache.bytes_per_block(model.config, model.dtype)
    assert model.made == [pytest.approx(num_bytes / bytes_per_block, abs=1)]


def test_blocks_that_are_counted_need_no_measurement(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "measure_needs", lambda *_: pytest.fail("measured"))
    sizing.make_kv_cache(VerifierConfig(device="cuda", num_kv_blocks=77), model)
    assert model.made == [77]


def test_a_cpu_gets_a_gibibyte(folder: Path) -> None:
    loaded = loading.load_verifier(config(folder, kv_cache_memory=0), "me")
    assert loaded.description.num_blocks == (1 << 30) // (2 * 2 * 2 * 8 * 16 * 4)


def test_a_model_that_leaves_no_room_for_a_block_is_refused(model: SimpleNamespace) -> None:
    model.needs = MemoryNeeds(2048 * MIB, 32 * MIB, 1024 * MIB, 512 * MIB)
    with pytest.raises(ResourceExhaustedError, match=r"gpu_memory_utilization 0\.9 is .* of 4\.0 GiB, .*weights 2\.0 GiB.* lower max_num_seqs"):
        sizing.make_kv_cache(VerifierConfig(device="cuda"), model)


def test_the_runner_is_measured_as_it_will_be_made(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(sizing, "RoundRunner", lambda model, kv_cache, limits, **options: made.append((limits, options)))
    settings = VerifierConfig(
        device="cuda", max_num_seqs=7, max_num_batched_tokens=99, max_outstanding_rounds=3, use_cuda_graphs=False,
        speculative_config=SpeculativeConfig(num_speculative_tokens=4),
    )  # fmt: skip
    monkeypatch.setattr(sizing, "measure_needs", lambda _model, make_runner: (make_runner(None), model.needs)[1])
    sizing.make_kv_cache(settings, model)
    [(limits, options)] = made
    assert (limits.max_num_seqs, limits.max_num_draft_tokens, limits.max_num_batched_tokens, limits.max_model_len) == (7, 4, 99, 512)
    assert options == {"num_in_flight": 3, "use_graphs": False}


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.cuda.OutOfMemoryError(CUDA)


@pytest.mark.parametrize(
    ("where", "name", "message"),
    [
        (loading, "open_model", r"cannot load the weights of tiny-model on cpu: .*2\.00 GiB more were asked for.* serve a smaller model"),
        (loading, "_make_rounds", r"cannot capture the graphs of all rounds on cpu: .* lower max_num_seqs, max_num_batched_tokens or num_spec"),
        (loading, "profile_verifier", r"cannot measure the costs of rounds on cpu: .* lower max_num_seqs"),
        (
            torch,
            "zeros",
            r"cannot allocate 100 KV blocks of 4096 bytes .* on cpu: .*; lower kv_cache_memory, num_kv_blocks or gpu_memory_utilization",
        ),
    ],
)
def test_out_of_memory_says_what_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str, message: str) -> None:
    monkeypatch.setattr(where, name, out_of_memory)
    with pytest.raises(ResourceExhaustedError, match=message):
        loading.load_verifier(config(folder), "me")


def test_out_of_memory_of_the_largest_round_alone(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "measure_needs", out_of_memory)
    with pytest.raises(ResourceExhaustedError, match=r"cannot run the largest round, even without a KV cache, on cuda: .*; lower max_num_seqs"):
        sizing.make_kv_cache(VerifierConfig(device="cuda"), model)


def test_the_longest_sequence_is_checked_before_anything_is_measured(model: SimpleNamespace) -> None:
    with pytest.raises(SpecwireError, match="max_model_len is 999, but the model's context is 512"):
        sizing.make_kv_cache(VerifierConfig(device="cuda", max_model_len=999), model)
