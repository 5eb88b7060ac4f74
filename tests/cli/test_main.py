"""The command line as a whole: quick help, version, and one line for a wrong option."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specwire.cli import app, main
from specwire.cli.up import how_to_call
from specwire.config import CoordinatorConfig
from specwire.version import build_version


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["generate", "--help"]])
def test_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize(("handler", "status"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)])
def test_ctrl_c_while_it_is_imported(handler: str, status: int) -> None:
    """The end of the program and nothing else; in the background of a shell it is ignored."""
    program = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'specwire.cli.commands':\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        f"signal.signal(signal.SIGINT, signal.{handler})\n"
        "import specwire.cli\n"
        f"assert signal.getsignal(signal.SIGINT) is signal.{handler}\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stderr) == (status, "")


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from specwire.cli import main\n"
        "sys.argv = ['specwire', 'up', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "sys.stderr.write(' '.join({'torch', 'transformers', 'grpc', 'numpy', 'tokenizers', 'rich'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "Usage: specwire up" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(("given", "expected"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_writes_errors_only_unless_the_user_wants_more(monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", given or "")  # what is set here is undone
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    monkeypatch.setattr("sys.argv", ["specwire", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["GRPC_VERBOSITY"] == expected


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"specwire {build_version()}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--port", "65536"], "--port is 65536"),
        (["up", "--verifiers", "0"], "--verifiers is 0"),
        (["up", "--dtype", "int3"], "--dtype is 'int3'"),
        (["up", "--speculative-config", "ngram"], "no JSON"),
        (["up", "--speculative-config", '{"metod": "ngram"}'], "did you mean 'method'?"),
        (["up", "--speculative-config", '{"method": "medusa"}'], "method 'medusa' is not built"),
        (["up", "--demoo"], "--demoo"),
        (["uo"], "uo"),
        (["generate"], "PROMPT"),
        (["up", "--no-drafter", "--drafters", "2"], "--no-drafter and --drafters 2 exclude each other"),
        (["up", "--config=", "--tensor-parallel-size", "2"], "--tensor-parallel-size is 2, but only 1 is built; a model must fit on one device"),
        (["up", "--config=", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype is fp8, but only auto is built"),
        (["up", "--config=", "--enable-lora"], "--enable-lora is true, but only false is built; merge the adapter"),
        (["up", "--config=", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization is 2.0, but must be a number from 0.01 to 1"),
        (["up", "--demo", "--skip-tokenizer"], "--demo sends text, and with --skip-tokenizer no tokenizer is served; leave one out"),
        (["up", "--config=", "--set", "verifier.kv_cache_dtype=fp8"], "verifier.kv_cache_dtype is fp8, but only auto is built"),
    ],
)
def test_wrong_arguments_end_with_status_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find_spec(name, *rest))
    result = CliRunner().invoke(app, ["up"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "torch is not installed: install Specwire with the extra engine (in its folder: pip install '.[engine]')" in result.stderr


@pytest.mark.parametrize(
    ("module", "flags"), [("verifier_svc", ()), ("drafter_svc", ("--speculative-config", '{"method": "draft_model", "model": "m"}'))]
)
def test_services_without_the_engine_say_so_in_a_line(module: str, flags: tuple[str, ...]) -> None:
    hidden = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *r: None if n == 'torch' else f(n, *r); import runpy; "
    program = f"{hidden}runpy.run_module('{module}', run_name='__main__')"
    command = [sys.executable, "-c", program, "--config=", "--listen", "127.0.0.1:0", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "torch is not installed: install Specwire with the extra engine" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["./no-such-model"], 1, "the model ./no-such-model does not exist"),
        (["./one", "--model", "./other"], 2, "the model is ./one, but --model is ./other; name one"),
        (["--host", "0.0.0.0"], 2, "there is no --host: services listen on 127.0.0.1 unless told otherwise; give --set http.listen=0.0.0.0:8000 and"),
    ],
)
def test_up_as_other_servers_are_called(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(app, ["up", *arguments])
    assert (result.exit_code, result.stdout) == (status, "")
    assert message in result.stderr


def test_missing_draft_model_is_named() -> None:
    result = CliRunner().invoke(app, ["up", "--speculative-config", '{"model": "./no-such-draft"}'])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the model ./no-such-draft does not exist" in result.stderr


@pytest.mark.parametrize(
    ("values", "command", "call"),
    [
        ({}, 'specwire generate "The capital of France is"', "Client()"),
        ({"listen": ("127.0.0.1:7",)}, 'specwire generate "The capital of France is" --address 127.0.0.1:7', "Client('127.0.0.1:7')"),
        (
            {"tls_cert": "a.pem", "tls_key": "k.pem"},
            'specwire generate "The capital of France is" --tls-ca a.pem',
            "Client(tls=TlsOptions('a.pem'))",
        ),
        (
            {"listen": ("0.0.0.0:7",), "tls_cert": "a.pem", "tls_key": "k.pem", "tls_ca": "ca.pem", "tls_client_auth": True},
            'specwire generate "The capital of France is" --address 127.0.0.1:7 --tls-ca a.pem --tls-cert CERT --tls-key KEY',
            "Client('127.0.0.1:7', tls=TlsOptions('a.pem', 'CERT', 'KEY'))",
        ),
        ({"listen": ("unix:/tmp/c",)}, 'specwire generate "The capital of France is" --address unix:/tmp/c', "Client('unix:/tmp/c')"),
        ({"api_keys": "k.yaml"}, 'SPECWIRE_API_KEY=... specwire generate "The capital of France is"', "Client()"),
    ],
)
def test_first_calls_name_what_they_need(values: dict[str, Any], command: str, call: str) -> None:
    shell, python = how_to_call(CoordinatorConfig(**values))
    assert shell == command
    assert call in python
    assert python.startswith("from specwire import Client")
    compile(python, "first call", "exec")


def test_without_a_tokenizer_the_first_call_sends_ids() -> None:
    [python] = how_to_call(CoordinatorConfig(), takes_text=False)
    assert python == "from specwire import Client; print(Client().generate([1, 2, 3]).token_ids)"


@pytest.mark.parametrize(
    "arguments", [["--version"], ["config", "check", "specwire.yaml"], ["config", "show", "specwire.yaml"], ["batch", "requests"]]
)
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "specwire.yaml").write_text("up: {port: 1234}\n")
    (tmp_path / "requests").write_text('{"prompt": "a", "unknown": 1}\n')
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "specwire.cli", *arguments]
        result = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("specwire: standard output or a file can't be read or written (No space left on device)")
    assert "Traceback" not in result.stderr


def test_a_pipe_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "specwire.cli", "--version"], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "requests").write_text('{"prompt": "a"}\n')
    command = [sys.executable, "-m", "specwire.cli", "batch", "requests", "--output", "x" * 300]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert f"specwire: {'x' * 300} can't be read or written (File name too long)" in result.stderr
    assert "Traceback" not in result.stderr
