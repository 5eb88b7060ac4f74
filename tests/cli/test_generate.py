"""`specwire generate` against a coordinator with predictable output."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from coordinator.sink import Sink
from specwire.cli import app
from specwire.errors import UnavailableError
from specwire.messages import GenerateRequest
from tests.cli.conftest import Coordinator
from tests.coordinator.scripted_engine import ScriptedRequest

TIMEOUT_S = 60.0


def generate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments])


def run_process(*arguments: str | bytes, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "specwire.cli", "generate", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONUTF8": "1"})


def test_text_is_printed(coordinator: Coordinator) -> None:
    result = generate("ABC", "--max-tokens", "5", "--address", coordinator.address)
    assert (result.stdout, result.stderr, result.exit_code) == ("DEFGH\n", "", 0)


def test_json_has_everything(coordinator: Coordinator) -> None:
    result = generate("ABC", "--max-tokens", "5", "--address", coordinator.address, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "text": "DEFGH",
        "token_ids": [68, 69, 70, 71, 72],
        "finish_reason": "length",
        "stop_cause": None,
        "usage": {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_generated_tokens": 5},
        "spec": {
            "num_drafts": 2,
            "num_draft_tokens": 6,
            "num_accepted_tokens": 3,
            "accepted_per_position": [2, 1, 0],
            "acceptance_length": 2.5,
            "num_steps": 0,
            "num_preemptions": 0,
            "synthetic": False,
        },
    }


def test_sampling_parameters_arrive(coordinator: Coordinator) -> None:
    options = ["--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--seed", "0", "--stop", "xx", "--stop", "yy"]
    result = generate("ABC", *options, "--address", coordinator.address)
    assert result.exit_code == 0, result.stderr
    sampling = coordinator.engine.requests[-1].request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (7, 0.5, 0.9, 3, 0)
    assert sampling.stop == ("xx", "yy")
    assert sampling.max_draft_tokens is None


def test_drafts_can_be_left_out(coordinator: Coordinator) -> None:
    assert generate("ABC", "--max-draft-tokens", "0", "--address", coordinator.address).exit_code == 0
    assert coordinator.engine.requests[-1].request.sampling.max_draft_tokens == 0


def test_defaults_are_greedy(coordinator: Coordinator) -> None:
    assert generate("ABC", "--address", coordinator.address).exit_code == 0
    sampling = coordinator.engine.requests[-1].request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed, sampling.stop) == (128, 0.0, 0, None, ())


def test_stop_string_cuts_the_text(coordinator: Coordinator) -> None:
    result = generate("ABC", "--stop", "FG", "--address", coordinator.address, "--json")
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["finish_reason"], answer["stop_cause"]) == ("DE", "stop", "FG")
    assert generate("ABC", "--stop", "FG", "--address", coordinator.address).stdout == "DE\n"


def test_chat_uses_the_served_template(coordinator: Coordinator) -> None:
    assert generate("ABC", "--chat", "--max-tokens", "1", "--address", coordinator.address).exit_code == 0
    assert bytes(coordinator.engine.requests[-1].request.prompt_token_ids) == b"<ABC>"


def test_address_comes_from_the_environment(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECWIRE_ADDRESS", coordinator.address)
    assert generate("ABC", "--max-tokens", "2").stdout == "DE\n"


def test_prompt_from_standard_input(coordinator: Coordinator) -> None:
    result = run_process("-", "--max-tokens", "2", "--json", "--address", coordinator.address, stdin="aé".encode())
    assert result.returncode == 0, result.stderr
    assert coordinator.engine.requests[-1].request.prompt_token_ids == list("aé".encode())
    result = run_process("aé", "--max-tokens", "2", "--json", "--address", coordinator.address)
    assert result.returncode == 0, result.stderr
    assert coordinator.engine.requests[-1].request.prompt_token_ids == list("aé".encode())


def test_a_closed_standard_input_is_named() -> None:
    command = [sys.executable, "-m", "specwire.cli", "generate", "-"]
    result = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, timeout=TIMEOUT_S)
    assert result.returncode == 2
    assert result.stderr.decode().startswith("specwire: the prompt is to come from standard input, which is closed;")


@pytest.mark.parametrize(("arguments", "stdin"), [([b"ab\xff"], None), (["-"], b"ab\xff")])
def test_prompt_that_is_no_utf8_is_refused(arguments: list[str | bytes], stdin: bytes | None) -> None:
    result = run_process(*arguments, stdin=stdin)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode() == "specwire: the prompt is not valid UTF-8: byte 2 is 0xff; convert it (iconv -t UTF-8), or remove it\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-p", "0"], "top_p is 0"),
        (["--top-k", "-2"], "top_k"),
        (["--seed", "-1"], "seed"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--stop", ""], "stop"),
        (["--max-token", "3"], "--max-token"),
    ],
)
def test_bad_options_end_with_status_2(options: list[str], message: str) -> None:
    result = generate("ABC", *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("options", [[], ["--json"], ["--chat"]])
def test_absent_server_is_named(options: list[str]) -> None:
    result = generate("ABC", "--address", "127.0.0.1:1", *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1:1" in result.stderr
    assert "`specwire up`" in result.stderr


@pytest.mark.usefixtures("hasty")
def test_a_server_that_does_not_serve_yet_needs_no_other(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: GenerateRequest, sink: Sink) -> ScriptedRequest:
        raise UnavailableError("not serving: no verifier is connected; try again later")

    monkeypatch.setattr(coordinator.engine, "submit", refuse)
    result = generate("ABC", "--address", coordinator.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "specwire: not serving: no verifier is connected; try again later\n"


def test_refusal_of_the_server_is_shown(coordinator: Coordinator) -> None:
    coordinator.engine.vocab_size = 10
    result = generate("ABC", "--address", coordinator.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "specwire: the prompt holds token id 65, but ids must be from 0 to 9\n"


def test_empty_prompt_is_named(coordinator: Coordinator) -> None:
    result = generate("", "--address", coordinator.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "specwire: the prompt is empty; send at least one token\n"


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1", "http://127.0.0.1:50050"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_wrong_addresses_are_wrong_arguments(monkeypatch: pytest.MonkeyPatch, address: str, by_variable: bool) -> None:
    if by_variable:
        monkeypatch.setenv("SPECWIRE_ADDRESS", address)
    result = generate("ABC", *([] if by_variable else ["--address", address]))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"specwire: the address is '{address}', but must be unix:path or host:port with a port from 1 to 65535\n"


def test_text_needs_a_tokenizer(bare_coordinator: Coordinator) -> None:
    result = generate("ABC", "--address", bare_coordinator.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "serves no tokenizer" in result.stderr


def test_several_choices(coordinator: Coordinator) -> None:
    options = ["ABC", "--n", "2", "--max-tokens", "3", "--address", coordinator.address]
    assert generate(*options).stdout == "--- choice 0\nDEF\n--- choice 1\nEFG\n"
    choices = json.loads(generate(*options, "--json").stdout)["choices"]
    assert [choice["text"] for choice in choices] == ["DEF", "EFG"]


def test_request_id_and_timeout_arrive(coordinator: Coordinator) -> None:
    assert generate("ABC", "--request-id", "mine", "--timeout", "50", "--address", coordinator.address).exit_code == 0
    request = coordinator.engine.requests[-1].request
    assert request.request_id == "mine"
    assert 0 < request.timeout_ms <= 50_000


@pytest.mark.parametrize(("option", "value"), [("--timeout", "0"), ("--timeout", "nan"), ("--n", "0")])
def test_wrong_options_of_the_call(option: str, value: str) -> None:
    result = generate("ABC", option, value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"specwire: {option[2:]} is {value}")
