"""Every `$ specwire ...` line of the README and the documentation, run as it stands against a stack with a tiny model.

Only paths, ports and waiting times are replaced. Commands for Docker and make have tests of their own (tests/packaging), as has training
(tests/train). Where documents show a command several times, the default suite runs the first; the others are parsed there
(tests/packaging/test_docs_commands.py) and run in the full matrix.
"""

import contextlib
import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specwire.cli.up import free_port
from specwire.errors import SpecwireError
from tests.cli.up_process import Up

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
OF_OTHER_TESTS = re.compile(r"(make|docker|python|pip|git|openssl|specwire train)\b")
PROGRAMS = [
    (name, program)
    for name in ("README.md", "docs/quickstart.md", "docs/http.md", "docs/metrics.md")
    for program in re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
]
NUM_SERVICES = 4
"""Of the stack, whose metrics have one port after the other."""
STACK = "specwire up --trace-file traces.jsonl --metrics-port 9464"
"""The command that starts what the others call."""
QUICKER = {"--request-rate": "100", "--num-prompts": "4", "--vocab-size": "256"}


def documented() -> list[str]:
    """Command lines without their prompts, comments and variables; each once."""
    lines = [line for name in DOCUMENTS for line in _console_lines((ROOT / name).read_text(encoding="utf-8"))]
    lines = [re.sub(r"^([A-Z_]+=\S+ )+", "", line).replace(".venv/bin/", "").removesuffix("&").strip() for line in lines]
    return list(dict.fromkeys(line for line in lines if not OF_OTHER_TESTS.match(line)))


def _console_lines(text: str) -> Iterator[str]:
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith("$ "):
                yield line[2:].split("  #")[0].strip()


def starts_services(command: str) -> bool:
    return bool(re.match(r"specwire (up|verifier|drafter|coordinator|http)\b", command))


def by_cost(commands: list[str]) -> Iterator[Any]:
    """Those that read traces come last, since they need some; all but the first of a kind are slow."""
    known = {"specwire sweep", "specwire chat", "specwire bench accept"}  # have tests of their own that are quicker
    for command in sorted(commands, key=lambda command: "trace" in command):
        kind = re.findall(r"^(?:specwire(?: [a-z]+(?= |$))+|\S+ -sN?(?= )|\S+)", command.rpartition(" | ")[2])[0]
        yield pytest.param(command, marks=[pytest.mark.slow] if kind in known else [])
        known.add(kind)


CALLS = [command for command in documented() if not starts_services(command)]
STARTS = [command for command in documented() if starts_services(command)]


def free_ports(number: int) -> int:
    """The first of so many in a row."""
    while True:
        first = free_port(0)
        with contextlib.suppress(SpecwireError):
            return min(free_port(first + offset) for offset in range(number))


class Stack:
    """A running `specwire up` in a folder that has what the documented commands name."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        questions = [{"id": str(i), "category": ("coding", "qa")[i % 2], "turns": [f"abcabc{i}"]} for i in range(4)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")
        requests = [{"id": "a", "prompt": "Once upon a time", "max_tokens": 8}]
        (folder / "requests.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests), encoding="utf-8")
        self.metrics_port = free_ports(NUM_SERVICES)
        options = shlex.split(STACK.replace("9464", str(self.metrics_port)))[2:]
        self.up = Up(
            folder,
            *options,
            "--port",
            "0",
            "--http-port",
            "0",
            "--model",
            str(model),
            "--kv-cache-memory",
            "8000000",
            "--num-threads",
            "1",
            timeout_s=100,
        )
        self.address = self.up.wait_ready()
        self.url = self.up.wait_for(r"OpenAI-compatible HTTP API: (\S+)/v1")

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        for option, value in QUICKER.items():
            command = re.sub(rf"{option} \S+", f"{option} {value}", command)
        command = command.replace("127.0.0.1:50050", self.address).replace("127.0.0.1:9464", f"127.0.0.1:{self.metrics_port}")
        command = command.replace("http://127.0.0.1:8000", self.url)
        words = shlex.split(command)
        if "--tls-ca" in words:  # this stack has no TLS; tests/security has
            del words[words.index("--tls-ca") : words.index("--tls-ca") + 2]
        if words[:3] == ["specwire", "bench", "serve"]:
            words += ["--output-len", "8", "--input-len", "16"]
        if words[:2] == ["specwire", "advise"]:
            words += ["--output-len", "16", "--concurrency", "1,4", "--step-len", "16", "--repeats", "1"]
        text = ""
        if words[0] == "printf":
            text, words = words[1].replace("\\n", "\n"), words[words.index("|") + 1 :]
        if words[0] == "curl":
            [url] = [word for word in words if word.startswith("http://")]
            data = words[words.index("-d") + 1].encode() if "-d" in words else None
            request = f"u.Request({url!r}, {data!r}, {{'content-type': 'application/json'}})"
            words = [sys.executable, "-c", f"import urllib.request as u; print(u.urlopen({request}).read().decode())"]
        else:
            assert words[0] == "specwire", f"nothing here runs {command!r}"
            words = [sys.executable, "-m", "specwire.cli", *words[1:]]
        environment = {**os.environ, "SPECWIRE_ADDRESS": self.address, "PYTHONPATH": str(ROOT)}
        options = {"capture_output": True, "text": True, "encoding": "utf-8", "errors": "replace", "timeout": 100}
        return subprocess.run(words, cwd=self.folder, env=environment, input=text or "abc\n", **options)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from tests.engine.tiny_models import save_tiny_model

    model = tmp_path_factory.mktemp("tiny")
    save_tiny_model(model, max_position_embeddings=2048)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    stack = Stack(tmp_path_factory.mktemp("folder"), model)
    try:
        yield stack
    finally:
        assert stack.up.end(signal.SIGINT) == 0


def test_there_are_commands() -> None:
    assert STACK in STARTS, "the README starts a stack with traces and metrics"
    for word in ("generate", "chat", "batch", "status", "trace", "bench serve", "bench accept", "advise", "config check", "config show"):
        assert any(f"specwire {word}" in command for command in CALLS), f"no document shows `specwire {word}`"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [*by_cost(CALLS)])
def test_a_call(stack: Stack, command: str) -> None:
    if "config check" in command or "config show" in command:
        (stack.folder / "specwire.yaml").write_text((ROOT / "examples/specwire.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    try:
        if "my-request" in command:
            label_a_request(stack)
        result = stack.run(command)
    finally:
        (stack.folder / "specwire.yaml").unlink(missing_ok=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    assert (result.stdout + result.stderr).strip(), f"{command} says nothing"


@pytest.mark.parametrize(("document", "program"), PROGRAMS)
def test_a_program(stack: Stack, document: str, program: str) -> None:
    assert document
    program = program.replace("127.0.0.1:50050", stack.address).replace("http://127.0.0.1:8000", stack.url)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, document, "exec"), {"__name__": "__main__"})
    assert output.getvalue().strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_offline_program(stack: Stack) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/offline.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = program.replace('model="SmolLM2-135M-Instruct"', f"model={str(stack.model)!r}, num_threads=1, kv_cache_memory=8_000_000")
    assert str(stack.model) in program
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=stack.folder, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr
    assert "The capital of France is -> " in result.stdout


@pytest.mark.parametrize("command", STARTS)
def test_a_start_is_understood(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole configuration is built from the command line; that such processes serve is what the other tests show."""
    from typer.testing import CliRunner

    from specwire.arguments import parse_flags
    from specwire.cli import app
    from specwire.config import CoordinatorConfig, DrafterConfig, HttpConfig, VerifierConfig

    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    kinds = {"verifier": VerifierConfig, "drafter": DrafterConfig, "coordinator": CoordinatorConfig, "http": HttpConfig}
    if words[0] in kinds:
        for name in re.findall(r"[\w-]+\.(?:crt|key|pem|yaml)", command):
            (tmp_path / name).touch()
        parse_flags(kinds[words[0]], "specwire", words[1:])
        return
    stopped = functools.partial(_note, started := [])
    monkeypatch.setattr("specwire.cli.up.run_up", stopped)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert len(started) == 1, result.output


def _note(started: list[object], *arguments: object, **options: object) -> None:
    started.append((arguments, options))


def label_a_request(stack: Stack) -> None:
    from specwire import Client

    with Client(stack.address) as client:
        client.generate("abc", max_tokens=4, request_id="my-request")
