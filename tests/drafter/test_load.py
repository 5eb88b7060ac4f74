"""A draft model from a folder, as the service loads and serves it."""

from pathlib import Path

import pytest
import torch

from drafter_svc.load import load_draft_model
from specwire.config import DrafterConfig
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


def test_memory_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("specwire.engine.kv_cache.torch.zeros", fail)
    message = r"cannot allocate 1024 KV blocks of \d+ bytes \(.* in all\) on cpu: out of memory \(.*are free\); lower kv_cache_memory"
    with pytest.raises(ResourceExhaustedError, match=message):
        load_draft_model(config(folder))


def test_a_model_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(SpecwireError, match=r"missing\.gguf"):
        load_draft_model(config(folder / "missing.gguf"))


def test_without_a_tokenizer_the_fingerprint_is_empty_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    assert load_draft_model(config(tmp_path / "m")).description.tokenizer_fingerprint == ""
    assert "no tokenizer.json" in caplog.text
