"""From the configuration to a served verifier: memory, limits, description, cost table, and processes that start, stop and fail clearly."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

from specwire.config import VerifierConfig, flags
from specwire.engine.models.decoder import NUMERICS_VERSION
from specwire.errors import InvalidArgumentError
from specwire.messages import RowStatus
from specwire.rpc import is_serving, open_channel
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import verifier_pb2 as pb
from specwire.v1 import verifier_pb2_grpc
from specwire.wire.describe import unpack_description, unpack_tokenizer
from tests.verifier.harness import Rounds
from verifier_svc.loading import load_verifier

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
BYTES_PER_BLOCK = 2 * 2 * 2 * 8 * 16 * 4  # K and V, layers, heads, head_dim, tokens, float32


@pytest.fixture(autouse=True)
def keep_threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def folder(tmp_path):
    """A model's folder without weights, for load_format dummy."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2", "bos_token": "w1", "chat_template": "{{ messages }}"}))
    return folder


def config(folder, **changes):
    values = {"model": str(folder), "load_format": "dummy", "dtype": "float32", "num_threads": 1, "kv_cache_memory": 100 * BYTES_PER_BLOCK + 17}
    return VerifierConfig(**(values | changes))


def test_the_description_says_what_was_loaded(folder):
    loaded = load_verifier(config(folder, max_num_seqs=3, max_num_batched_tokens=40), "me")
    description = loaded.description
    assert (description.model_id, description.instance_id, description.dtype, description.device) == ("tiny-model", "me", "float32", "cpu")
    assert (description.vocab_size, description.max_model_len, description.num_blocks, description.block_size) == (64, 512, 100, 16)
    assert (description.max_num_seqs, description.max_num_draft_tokens, description.max_num_batched_tokens) == (3, 5, 40)
    assert (description.eos_token_ids, description.max_message_bytes, description.rejection_sample_method) == ((2,), 64 << 20, "strict")
    assert len(description.weights_hash) == 64
    assert description.numerics_version == f"{NUMERICS_VERSION}.1"
    assert description.build == "0.1.0"
    assert loaded.tokenizer.fingerprint == description.tokenizer_fingerprint
    assert (loaded.tokenizer.vocab_size, loaded.tokenizer.max_model_len, loaded.tokenizer.chat_template) == (60, 512, "{{ messages }}")
    cost = description.verify_cost
    assert cost.num_tokens == (1, 2, 3, 4, 5, 6, 8, 16, 18)  # up to 3 sequences x (1 + 5) tokens
    assert list(cost.step_ms) == sorted(cost.step_ms)
    assert cost.step_ms[0] > 0
    assert cost.ms_per_row >= 0 <= cost.ms_per_kv_token


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_eos_ids_that_the_model_does_not_have_are_left_out(folder, caplog, has_tokenizer):
    """Every request would be refused for them."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 64, 999]}))
    loaded = load_verifier(config(folder, skip_tokenizer=not has_tokenizer), "me")
    assert loaded.description.eos_token_ids == (2,)
    assert "of the EOS ids (2, 64, 999) only (2,) are the model's, whose ids end at 63" in caplog.text


def test_dummy_weights_are_reproducible(folder):
    first, second = (load_verifier(config(folder), "me") for _ in range(2))
    assert first.description.weights_hash == second.description.weights_hash
    tokens = [Rounds(loaded.verifier).open(0, [1, 2, 3]).token_ids for loaded in (first, second)]
    assert tokens[0] == tokens[1]


def test_dtype_auto_is_bfloat16(folder):
    loaded = load_verifier(config(folder, dtype="auto"), "me")
    assert loaded.description.dtype == "bfloat16"
    assert loaded.description.num_blocks == 200  # half the bytes
    assert Rounds(loaded.verifier).open(0, [1, 2, 3]).status == RowStatus.OK


def test_max_model_len_is_clipped_to_what_fits_and_says_so(folder, caplog):
    loaded = load_verifier(config(folder, num_kv_blocks=10), "me")
    assert loaded.description.max_model_len == 160
    assert loaded.tokenizer.max_model_len == 160
    assert "max_model_len is 160 instead of 512: 10 KV blocks of 16 tokens hold 160" in caplog.text
    row = Rounds(loaded.verifier).open(0, [1] * 160)
    assert "the sequence has 160 tokens, but max_model_len is 160" in row.error


def test_a_model_without_tokenizer_is_served_with_a_warning(folder, caplog):
    (folder / "tokenizer.json").unlink()
    loaded = load_verifier(config(folder), "me")
    assert (loaded.tokenizer, loaded.description.tokenizer_fingerprint, loaded.description.eos_token_ids) == (None, "", (2,))
    assert "has no tokenizer.json" in caplog.text


def test_a_tokenizer_can_be_left_out(folder, caplog):
    """Two verifiers, with and without, tell what they are: the one without has no fingerprint, and takes the model's EOS."""
    caplog.set_level(logging.INFO)
    loaded = load_verifier(config(folder, skip_tokenizer=True), "me")
    assert (loaded.tokenizer, loaded.description.tokenizer_fingerprint, loaded.description.eos_token_ids) == (None, "", (2,))
    assert "no tokenizer, as asked for" in caplog.text
    assert "no tokenizer.json" not in caplog.text
    assert re.search(r"loaded tiny-model \(fp32 weights [0-9a-f]{12}, float32, cpu\) in [\d.]+ s", caplog.text)


def test_synthetic_rates_come_from_the_configuration(folder):
    speculative = SpeculativeConfig(rejection_sample_method="synthetic", num_speculative_tokens=2, synthetic_acceptance_rates=(0.5, 0.25))
    loaded = load_verifier(config(folder, speculative_config=speculative), "me")
    assert loaded.verifier.limits.synthetic_rates == (0.5, 0.25)
    assert loaded.description.rejection_sample_method == "synthetic"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "./no-such-model.gguf"}, "no-such-model.gguf does not exist"),
        ({"max_model_len": 513}, "max_model_len is 513, but the model's context is 512"),
        ({"max_model_len": 513, "load_format": "auto"}, "max_model_len is 513, but the model's context is 512"),  # before weights are missed
        ({"kv_cache_memory": 100}, "kv_cache_memory is 100 bytes, but one KV block takes 4096"),
        ({"load_format": "auto"}, "has neither model.safetensors nor"),
        pytest.param({"device": "cuda"}, "sees no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")),
    ],
)
def test_what_cannot_be_loaded_says_why(folder, changes, match):
    with pytest.raises(InvalidArgumentError, match=match):
        load_verifier(config(folder, **changes), "me")


def test_the_cost_table_keeps_to_its_time(folder, caplog):
    caplog.set_level(logging.INFO)
    load_verifier(config(folder, max_num_batched_tokens=512, max_num_seqs=128), "me")
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("measured verify costs")]
    assert float(line.split()[4]) < 4.0, line


# --- the process ----------------------------------------------------------------------------------------------------


def start(*arguments, program=("-m", "verifier_svc"), cwd=Path(__file__).parents[2]):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment)


async def test_a_process_serves_until_sigterm(folder, socket_dir):
    address = f"unix:{socket_dir}/v.sock"
    process = start(*flags(config(folder, listen=(address, "127.0.0.1:0"))))
    try:
        lines = []
        while not lines or "ready: verifier" not in lines[-1]:
            lines.append(await asyncio.to_thread(process.stderr.readline))
            assert lines[-1], "".join(lines)
        assert address in lines[-1]
        async with open_channel(address) as channel:
            assert await is_serving(channel)
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            description = unpack_description((await stub.Describe(pb.VerifierServiceDescribeRequest())).description)
            assert (description.vocab_size, description.num_blocks) == (64, 100)
            assert unpack_tokenizer((await stub.GetTokenizer(pb.VerifierServiceGetTokenizerRequest())).tokenizer).vocab_size == 60
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.communicate()


async def test_sigterm_ends_a_process_that_loads(socket_dir):
    script = "import time, verifier_svc.__main__ as verifier; verifier._load = lambda *_: time.sleep(300); verifier.main()"
    address = f"unix:{socket_dir}/v.sock"
    process = start("--listen", address, program=("-c", script))
    try:
        async with open_channel(address) as channel, asyncio.timeout(20):
            await channel.channel_ready()
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0, errors
        assert "leaving while the model is still busy" in errors
        assert "Traceback" not in errors
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "status", "match"),
    [
        (["--model", "./missing.gguf", "--listen", "127.0.0.1:0"], 1, "the model file missing.gguf does not exist"),
        (["--model", "{folder}", "--load-format", "dummy", "--listen", "127.0.0.1:{port}"], 1, "cannot listen on 127.0.0.1:{port}"),
        (["--modle", "x"], 2, "--modle"),
        (["--dtype", "float17"], 2, "float17"),
    ],
)
def test_a_process_that_cannot_start_says_why_in_one_line(folder, arguments, status, match):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(*(argument.format(folder=folder, port=port) for argument in arguments))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert match.format(port=port) in errors
    assert "Traceback" not in errors
    assert len([line for line in errors.splitlines() if not any(word in line for word in ("usage", " INFO ")) and line[:1] != " "]) == 1, errors
