"""`specwire up` with the real services: a tiny random model, and the default one."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specwire import Client, FailedPreconditionError, SamplingParams, UnsupportedError
from specwire.tls import TlsOptions
from tests.cli.up_process import Up, children
from tests.security.certificates import Authority

PROMPT = "abcabcabcabc"
SHAPE = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    from tests.engine.tiny_models import save_tiny_model

    folder = tmp_path / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, socket_dir: Path) -> Iterator[list[Up]]:
    """What a test starts; ended in any case."""
    monkeypatch.setenv("TMPDIR", str(socket_dir))
    ups: list[Up] = []
    yield ups
    for up in ups:
        if up.process.poll() is None:
            up.process.kill()
            up.join()


def generate(address: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "specwire.cli", "generate", PROMPT, "--json", "--address", address, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.timeout(180)
def test_tiny_model_end_to_end(tiny_model: Path, tmp_path: Path, started: list[Up]) -> None:
    """Configured by a file; clients need mutual TLS, the services among themselves none."""
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("client")
    (tmp_path / "specwire.yaml").write_text(
        f"""\
verifier: {{model: {tiny_model}, dtype: float32, num_threads: 1, kv_cache_memory: 8_000_000}}
coordinator: {{tls_cert: {server.cert}, tls_key: {server.key}, tls_ca: {authority.file}, tls_client_auth: true}}
"""
    )
    up = Up(tmp_path, "--port", "0", timeout_s=120)
    started.append(up)
    address = up.wait_ready()
    tls = ("--tls-ca", authority.file, "--tls-cert", client.cert, "--tls-key", client.key)
    plain = (*tls, "--max-tokens", "64")
    sampled = (*plain, "--temperature", "0.6", "--top-p", "0.9", "--seed", "7")
    greedy = generate(address, *plain)
    assert greedy["usage"] == {"num_prompt_tokens": len(PROMPT), "num_cached_tokens": 0, "num_generated_tokens": len(greedy["token_ids"])}
    assert greedy["finish_reason"] in ("length", "stop")
    assert greedy["spec"]["num_draft_tokens"] > 0
    assert 0 < greedy["spec"]["num_accepted_tokens"] == sum(greedy["spec"]["accepted_per_position"])
    reference = generate(address, *sampled)

    with Client(address, tls=TlsOptions(authority.file, client.cert, client.key)) as calls:
        for name in ("drafter", "verifier", "coordinator"):
            os.kill(children(up)[name], signal.SIGKILL)
            up.wait_for(rf"{name} ended with signal SIGKILL and is (restarted)", "stderr")
            if name == "coordinator":
                up.wait_for(r"(serving): all peers are there", "stderr", count=4)
            else:
                up.wait_for(rf"lane 0: ({name}) \S+ is there", "stderr", count=2)
            assert calls.generate(PROMPT, max_tokens=64).token_ids == greedy["token_ids"], f"after the restart of the {name}"
            again = calls.generate(PROMPT, max_tokens=64, temperature=0.6, top_p=0.9, seed=7)
            assert again.token_ids == reference["token_ids"]

    pids = children(up).values()
    assert up.end(signal.SIGINT) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.timeout(180)
def test_a_configuration_alone_is_served_by_ids(tmp_path: Path, started: list[Up]) -> None:
    """Target and draft model are folders with nothing but config.json: weights are made up, and there is no tokenizer."""
    for name, num_layers in (("target", 2), ("draft", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))
    speculation = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
    options = ("--load-format", "dummy", "--skip-tokenizer", "--dtype", "float32", "--num-threads", "1", "--kv-cache-memory", "1000000")
    up = Up(tmp_path, "--port", "0", "--model", str(tmp_path / "target"), *options, "--speculative-config", speculation, timeout_s=120)
    started.append(up)
    address = up.wait_ready()
    up.wait_for(r"(Client)\(.*\)\.generate\(\[1, 2, 3\]\)\.token_ids\)", "stdout")
    with Client(address) as client:
        with pytest.raises(UnsupportedError, match="serves no tokenizer; send token ids"):
            client.generate("text")
        with pytest.raises(FailedPreconditionError, match="stop strings need a tokenizer, but the verifier serves none; use stop_token_ids"):
            client.generate([1, 2, 3], SamplingParams(max_tokens=4, stop=("x",)))
        answer = client.generate([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
        assert len(answer.token_ids) == 30
        assert answer.spec.num_draft_tokens > 0
    assert up.end(signal.SIGINT) == 0


@pytest.mark.timeout(120)
def test_damaged_model_is_named(tmp_path: Path, started: list[Up]) -> None:
    (tmp_path / "empty").mkdir()
    up = Up(tmp_path, "--port", "0", "--model", str(tmp_path / "empty"), timeout_s=90)
    started.append(up)
    assert up.join() == 1
    assert "specwire: verifier ended with status 1 before everything was ready; its own lines say why" in up.output["stderr"]
    assert up.output["stderr"].count("has no config.json") == 1
    assert "Traceback" not in up.output["stderr"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_of_the_default_model(tmp_path: Path, started: list[Up]) -> None:
    up = Up(tmp_path, "--port", "0", "--dtype", "float32", "--demo", timeout_s=600)
    started.append(up)
    address = up.wait_ready()
    accepted, proposed = map(int, re.findall(r"(\d+) of (\d+) draft tokens accepted", up.output["stdout"])[0])
    assert 0 < accepted <= proposed
    answer = up.output["stdout"].partition("answer:\n")[2]
    assert "def is_empty(self):\n        return len(self.items) == 0" in answer
    assert generate(address, "--max-tokens", "8")["usage"]["num_generated_tokens"] == 8
    assert up.end(signal.SIGINT) == 0
