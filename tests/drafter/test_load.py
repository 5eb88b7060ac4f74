"""A draft model from a folder, as the service loads and serves it."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafter_svc import load
from drafter_svc.load import load_draft_model
from drafter_svc.method import Ask
from specwire.config import DrafterConfig
from specwire.engine import memory
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.memory import DeviceMemory, MemoryNeeds
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import check_device
from specwire.errors import InvalidArgumentError, ResourceExhaustedError, SpecwireError
from specwire.messages import DraftCommit, DraftRow, DraftRowResult, RowStatus
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.helpers import DraftClient, describe, draft_stream, open_request, serve_drafter
from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "tiny"
    save_tiny_model(path)
    return path


def config(folder: Path, **options: object) -> DrafterConfig:
    spec = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4} | options.pop("spec", {})  # type: ignore[operator]
    return DrafterConfig(dtype="float32", num_threads=1, speculative_config=SpeculativeConfig.from_dict(spec), **options)  # type: ignore[arg-type]


async def drafts_when_caught_up(client: DraftClient, row: DraftRow) -> DraftRowResult:
    """Asks until the sequence is caught up; every answer before says that it is not."""
    for _ in range(100):
        (answer,) = (await client.ask(rows=[row])).rows
        if answer.status is not RowStatus.CATCHING_UP:
            return answer
        assert answer.draft_tokens == []
    raise AssertionError(f"{row} never caught up")


async def test_serves_a_folder(socket_dir: Path, folder: Path) -> None:
    prompt = list(range(100))
    async with serve_drafter(socket_dir, config(folder, prefill_chunk=32)) as server, draft_stream(server.addresses[0]) as client:
        description = await describe(server.addresses[0])
        initial = description.num_blocks
        assert (description.method, description.vocab_size, description.dtype, description.max_model_len) == ("draft_model", 259, "float32", 256)
        assert len(description.tokenizer_fingerprint) == 64
        assert description.weights_hash
        (first,) = (await client.ask(opens=[open_request(prompt, sampling=SamplingParams(temperature=0.7))], rows=[DraftRow(0, 1, 100, 4)])).rows
        assert (first.status, first.draft_tokens) == (RowStatus.CATCHING_UP, [])
        answer = await drafts_when_caught_up(client, DraftRow(0, 1, 100, 4))
        assert answer.status is RowStatus.OK
        assert len(answer.draft_tokens) == len(answer.confidences) == 4
        # Committed tokens continue where the drafts were right, and the rest follows.
        reply = await client.ask(commits=[DraftCommit(0, 1, 100, answer.draft_tokens[:2])], rows=[DraftRow(0, 1, 102, 2), DraftRow(1, 1, 5, 2)])
        assert reply.rows[0].draft_tokens == answer.draft_tokens[2:]
        assert reply.rows[1].status is RowStatus.STALE
        # An id of the target's padding ends drafting for its own sequence only.
        reply = await client.ask(
            opens=[open_request([1, 259], slot=1)], commits=[DraftCommit(0, 1, 102, [7])], rows=[DraftRow(1, 1, 2, 2), DraftRow(0, 1, 103, 2)]
        )
        assert [row.status for row in reply.rows] == [RowStatus.BAD, RowStatus.OK]
        assert "token id 259" in reply.rows[0].error
    assert server.worker.ready.result().num_free_blocks == initial


def test_the_runner_for_a_gpu_is_captured_before_its_first_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, where the same runner has no graphs."""
    caplog.set_level(logging.INFO)
    captured: list[DraftRunner] = []
    capture = DraftRunner.capture
    monkeypatch.setattr(DraftRunner, "capture", lambda runner, on_progress: (captured.append(runner), capture(runner, on_progress))[1])
    monkeypatch.setattr(load, "make_forward", DraftRunner)
    monkeypatch.setattr(load, "log_memory", lambda *_: None)  # asks CUDA
    on_device = load_draft_model(config(folder, max_num_seqs=3, prefill_chunk=32))
    monkeypatch.undo()
    eager = load_draft_model(config(folder, max_num_seqs=3, prefill_chunk=32))
    [runner] = captured
    assert on_device.counts is runner.counts
    answers = []
    for method in (on_device, eager):
        for seq_id in range(3):
            method.open(seq_id, open_request(range(5, 60 + seq_id), sampling=SamplingParams(temperature=0.5), noise_key=seq_id))
        while method.catch_up(32):
            pass
        answers.append(method.propose([Ask(seq_id, 4) for seq_id in range(3)]))
    assert [drafts.token_ids for drafts in answers[0]] == [drafts.token_ids for drafts in answers[1]]
    assert runner.counts.num_graph_passes == 4
    assert runner.counts.num_eager_passes == eager.counts.num_eager_passes - 4
    assert on_device.description == eager.description


def test_dummy_weights_and_windows(folder: Path) -> None:
    method = load_draft_model(config(folder, load_format="dummy", spec={"max_model_len": 90}))
    assert method.description.max_model_len == 90
    assert method.description.weights_hash != load_draft_model(config(folder)).description.weights_hash


def test_memory_decides_the_number_of_blocks(folder: Path) -> None:
    per_block = 2 * 3 * 2 * 16 * 16 * 4  # keys and values, layers, heads, head_dim, tokens, bytes
    assert load_draft_model(config(folder, kv_cache_memory=10 * per_block + 5)).description.num_blocks == 10
    assert load_draft_model(config(folder, max_num_seqs=2)).description.num_blocks == 2 * 256 // 16
    with pytest.raises(InvalidArgumentError, match=f"kv_cache_memory is {per_block} bytes, which is 1 KV blocks .* give at least {2 * per_block}"):
        load_draft_model(config(folder, kv_cache_memory=per_block))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"device is cuda:1, but torch .* sees no CUDA device; use --device cpu"):
        load_draft_model(config(folder, device="cuda:1"))


def test_kernels_go_to_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    for name, value in {"is_available": lambda: True, "device_count": lambda: 3, "set_device": chosen.append}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for device in ("cpu", "cuda:2", "cuda"):
        check_device(device)
    assert chosen == [2, 0]
    with pytest.raises(InvalidArgumentError, match="sees 3 CUDA devices"):
        check_device("cuda:3")


def test_memory_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("specwire.engine.kv_cache.torch.zeros", fail)
    message = r"cannot allocate 1024 KV blocks of \d+ bytes \(.* in all\) on cpu: out of memory \(.*are free\); lower kv_cache_memory"
    with pytest.raises(ResourceExhaustedError, match=message):
        load_draft_model(config(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("open_model", r"cannot load the weights of the draft model .*tiny on cpu: .*2\.00 GiB more were asked for.*; take a smaller draft model"),
        ("_make_forward", r"cannot capture the draft model's graphs on cpu: .* lower the drafter's max_num_seqs, prefill_chunk or num_speculative"),
    ],
)
def test_out_of_memory_says_what_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setattr(load, name, out_of_memory)
    with pytest.raises(ResourceExhaustedError, match=message):
        load_draft_model(config(folder))


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.5 GiB of which 1.2 GiB is free."
    )


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({}, 256 * 64 // 16),  # all sequences at full length
        ({"max_num_seqs": 4000}, None),  # what the share leaves
        ({"max_num_seqs": 4000, "kv_cache_memory": 1 << 20}, (1 << 20) // (2 * 2 * 16 * 16 * 3 * 2)),
    ],
)
def test_blocks_on_a_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path, options: dict[str, int], num_blocks: int | None) -> None:
    """On a device that is made up: 4 GiB, of which this process may use a quarter."""
    mib, measured = 1 << 20, []

    def measure(model: object, make_runner: object) -> MemoryNeeds:
        measured.append(make_runner)
        return MemoryNeeds(64 * mib, 32 * mib, 16 * mib, 8 * mib)

    monkeypatch.setattr(load, "measure_needs", measure)
    monkeypatch.setattr(load, "read_device_memory", lambda device: DeviceMemory(4096 * mib, 4000 * mib))
    model = SimpleNamespace(config=ModelConfig.from_folder(folder), dtype=torch.bfloat16, device=torch.device("cuda"))
    got = load._num_blocks(config(folder, device="cuda", gpu_memory_utilization=0.25, **options), model, 256)  # type: ignore[arg-type]
    assert bool(measured) == ("kv_cache_memory" not in options)
    if num_blocks is None:
        num_blocks = (int(1024 * mib * 0.99) - memory._CONTEXT_BYTES - 120 * mib) // (2 * 2 * 16 * 16 * 3 * 2)
    assert got == pytest.approx(num_blocks, abs=1)


def test_out_of_memory_of_the_largest_batch_alone(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(load, "measure_needs", out_of_memory)
    model = SimpleNamespace(config=ModelConfig.from_folder(folder), dtype=torch.bfloat16, device=torch.device("cuda"))
    with pytest.raises(ResourceExhaustedError, match=r"cannot run the draft model's largest batch, even without a KV cache, on cuda: .*; lower the"):
        load._num_blocks(config(folder, device="cuda"), model, 256)  # type: ignore[arg-type]


def test_a_model_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(SpecwireError, match=r"missing\.gguf"):
        load_draft_model(config(folder / "missing.gguf"))


def test_without_a_tokenizer_the_fingerprint_is_empty_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    assert load_draft_model(config(tmp_path / "m")).description.tokenizer_fingerprint == ""
    assert "no tokenizer.json" in caplog.text


def test_a_tokenizer_can_be_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert load_draft_model(config(folder, skip_tokenizer=True)).description.tokenizer_fingerprint == ""
    assert "no tokenizer, as asked for" in caplog.text
    assert "no tokenizer.json" not in caplog.text
    assert re.search(r"loaded .*tiny \(float32, cpu\) with 1024 KV blocks of 16 tokens in [\d.]+ s", caplog.text)
