"""What a verifier makes room for on a GPU, with a device that is made up, and what it says where memory ends."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specwire.config import VerifierConfig
from specwire.engine import memory
from specwire.engine.kv_cache import KVCache
from specwire.engine.memory import DeviceMemory, MemoryNeeds
from specwire.errors import ResourceExhaustedError, SpecwireError, UnavailableError
from specwire.messages import RowStatus
from specwire.speculative_config import SpeculativeConfig
from tests.engine.features.sources import eagle_source
from verifier_svc import loading, sizing

from .harness import Rounds, tiny_config
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
        def __init__(self, _config: object, num_blocks: int, _dtype: torch.dtype, _device: torch.device, **_features: object) -> None:
            made.append(num_blocks)

    monkeypatch.setattr(sizing, "KVCache", Cache)
    monkeypatch.setattr(sizing, "measure_needs", lambda _model, make_runner, features: model.needs)
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


def test_features_take_a_part_of_the_blocks(model: SimpleNamespace) -> None:
    sources = [eagle_source(32, dtype=torch.bfloat16)]
    for features in ((), sources):
        sizing.make_kv_cache(VerifierConfig(device="cuda", kv_cache_memory=100 * MIB, share_features="never"), model, features)
    assert model.made == [100 * MIB // KVCache.bytes_per_block(model.config, model.dtype, features=features) for features in ((), sources)]
    assert model.made[1] < model.made[0]


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"share_features": "never"}, False),
        ({"tls_cert": "c", "tls_key": "k"}, False),
        ({"tls_cert": "c", "tls_key": "k", "share_features": "always"}, True),
    ],
)
def test_where_features_are_shared(changes: dict, shares: bool) -> None:
    """In memory with whoever may read this process's; with TLS only if that is asked for."""
    cpu = SimpleNamespace(config=tiny_config(), dtype=torch.float32, device=torch.device("cpu"))
    cache = sizing.make_kv_cache(VerifierConfig(num_kv_blocks=3, **changes), cpu, [eagle_source(32)])
    assert cache.features is not None
    assert (cache.features.pool is not None) == shares
    if cache.features.pool is not None:
        assert len(cache.features.pool.words) == VerifierConfig().max_num_seqs


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "pwrite"])
def test_a_system_without_shared_memory_keeps_features_to_this_process(caplog, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, call, refuse)
    cpu = SimpleNamespace(config=tiny_config(), dtype=torch.float32, device=torch.device("cpu"))
    num_open = len(os.listdir("/proc/self/fd"))
    cache = sizing.make_kv_cache(VerifierConfig(num_kv_blocks=3), cpu, [eagle_source(32)])
    assert cache.features is not None
    assert cache.features.pool is None
    assert "features go to drafters over gRPC alone: the system gives no shared memory of" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == num_open


class SharedOnDevice:
    """Pages on a GPU that is made up."""

    def __init__(self, error: str = "") -> None:
        self.error, self.num_places = error, 0

    def share(self, num_places: int) -> None:
        if self.error:
            raise UnavailableError(self.error)
        self.num_places = num_places


@pytest.mark.parametrize("share_features", ["auto", "never"])
@pytest.mark.parametrize("error", ["", "no such handle"])
def test_pages_on_a_gpu_are_shared_where_that_works(model: SimpleNamespace, caplog, monkeypatch, error: str, share_features: str) -> None:
    pages = SharedOnDevice(error)
    monkeypatch.setattr(sizing.KVCache, "features", pages, raising=False)
    with caplog.at_level(logging.INFO):
        config = VerifierConfig(device="cuda", num_kv_blocks=7, max_num_seqs=5, share_features=share_features)
        sizing.make_kv_cache(config, model, [eagle_source(32)])
    assert pages.num_places == (5 if share_features == "auto" and not error else 0)
    reason = error if share_features == "auto" else "share_features is never"
    assert (f"features go to drafters over gRPC alone: {reason}" in caplog.text) == bool(reason)


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
    monkeypatch.setattr(sizing, "measure_needs", lambda _model, make_runner, _features: (make_runner(None), model.needs)[1])
    sizing.make_kv_cache(settings, model)
    [(limits, options)] = made
    assert (limits.max_num_seqs, limits.max_num_draft_tokens, limits.max_num_batched_tokens, limits.max_model_len) == (7, 4, 99, 512)
    assert options == {"num_in_flight": 3, "use_graphs": False}


def test_the_capture_says_how_far_it_is_and_where_memory_went(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tables: list[dict[str, int]] = []

    def capture(on_progress: Callable[[int, int], None]) -> None:
        for done in range(1, 4):
            clock.now += 3.0
            on_progress(done, 3)

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("specwire.engine.graphs.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    rounds = SimpleNamespace(capture=capture, memory=lambda: {"logits": 5})
    monkeypatch.setattr(loading, "make_round_runner", lambda *_: rounds)
    monkeypatch.setattr(loading, "log_memory", lambda parts, device, kv_cache: tables.append(parts))
    runner = SimpleNamespace(model=model, kv_cache=None)
    assert loading._make_rounds(VerifierConfig(device="cuda"), runner, SimpleNamespace(max_model_len=64), 1000) is rounds  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [f"capturing graphs: {done} of 3" for done in (1, 2, 3)]
    assert tables == [{"weights": 1000, "logits": 5}]


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


def test_more_than_any_machine_has_is_refused_for_real() -> None:
    with pytest.raises(ResourceExhaustedError, match=r"cannot allocate 68719476736 KV blocks of \d+ bytes \(.*TiB in all\) on cpu: out of memory \("):
        KVCache(tiny_config(), 1 << 36, torch.float32)


# --- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def wide_folder(tmp_path: Path) -> Path:
    """A model whose head dimension the kernels take."""
    folder = tmp_path / "wide-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 64}))
    return folder


@pytest.mark.gpu
def test_a_process_keeps_to_its_share(wide_folder: Path) -> None:
    share = 0.2
    settings = config(wide_folder, device="cuda", dtype="bfloat16", kv_cache_memory=0, gpu_memory_utilization=share, skip_tokenizer=True)
    loaded = loading.load_verifier(settings, "me")
    _, total = torch.cuda.mem_get_info()
    assert torch.cuda.memory_reserved() < share * total
    assert loaded.description.num_blocks * 2 * 2 * 2 * 64 * 16 * 2 > 0.5 * share * total, "most of it is for keys and values"
    assert Rounds(loaded.verifier).open(0, [1, 2, 3]).status is RowStatus.OK


@pytest.mark.gpu
def test_too_much_for_a_gpu_is_explained(wide_folder: Path) -> None:
    message = (
        r"cannot allocate \d+ KV blocks .* on cuda:\d+: out of memory \(.*asked for; .* are free, this process holds .*\); lower kv_cache_memory"
    )
    with pytest.raises(ResourceExhaustedError, match=message):
        loading.load_verifier(config(wide_folder, device="cuda", kv_cache_memory=1 << 46, skip_tokenizer=True), "me")
