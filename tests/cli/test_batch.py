"""`specwire batch` against a coordinator with predictable output: letters go on in the alphabet."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.sink import Sink
from specwire.cli.batch_lines import Writer, answered_ids, read_jobs
from specwire.errors import InvalidArgumentError, ResourceExhaustedError
from specwire.messages import GenerateRequest
from tests.cli.batch_calls import batch, lines, records
from tests.cli.conftest import Coordinator
from tests.coordinator.scripted_engine import ScriptedRequest

TIMEOUT_S = 60.0


def test_every_line_is_answered(coordinator: Coordinator, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    result = batch(source, "--output", output, "--address", coordinator.address)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    found = records(output.read_text())
    assert {key: record["text"] for key, record in found.items()} == {1: "CD", "two": "OPQ", 3: "Q"}
    assert found[1]["token_ids"] == [67, 68]
    assert found[1]["usage"] == {"num_prompt_tokens": 2, "num_cached_tokens": 0, "num_generated_tokens": 2}
    assert found[1]["finish_reason"] == "length"
    assert result.stderr.startswith("3 answered, 0 failed: 6 tokens in ")
    assert "\x1b" not in result.stderr


def test_progress_is_shown_on_a_terminal(coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    with source.open("a") as stream:
        stream.write("{}\n")
    result = batch(source, "--address", coordinator.address)
    assert len(records(result.stdout)) == 4
    assert "4/4" in result.stderr
    assert "1 failed" in result.stderr.partition("4/4")[2]


def test_standard_input_and_output_and_defaults(coordinator: Coordinator) -> None:
    text = lines([{"prompt": "AB"}, {"prompt": "AB", "temperature": 0.25, "seed": 3, "stop": "D", "logit_bias": {"7": 1.5}}])
    result = batch("-", "--address", coordinator.address, "--max-tokens", 3, "--temperature", 0.5, "--max-concurrency", 1, stdin=text)
    assert result.exit_code == 0, result.stderr
    assert [record["text"] for record in records(result.stdout).values()] == ["CDE", "C"]
    first, second = (request.request.sampling for request in coordinator.engine.requests)
    assert (first.max_tokens, first.temperature, first.seed) == (3, 0.5, None)
    assert (second.max_tokens, second.temperature, second.seed, second.stop, second.logit_bias) == (3, 0.25, 3, ("D",), {7: 1.5})


def test_conversations_and_several_choices(coordinator: Coordinator) -> None:
    text = lines(
        [
            {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
            {"prompt": "A", "n": 2, "max_tokens": 1},
            {"prompt": "A", "max_tokens": 1, "logprobs": 2},
        ]
    )
    result = batch("-", "--address", coordinator.address, stdin=text)
    assert result.exit_code == 0, result.stderr
    found = records(result.stdout)
    assert found[1]["usage"]["num_prompt_tokens"] == len("<A>")
    assert [choice["text"] for choice in found[2]["choices"]] == ["B", "C"]
    assert "logprobs" not in found[1]
    assert found[3]["logprobs"] == [{"sampled": -0.5, "top": [[0, -0.5], [1, -1.5]]}]


def test_a_bad_line_fails_alone(coordinator: Coordinator) -> None:
    bad = [
        ("{", "INVALID_ARGUMENT", "the line is no JSON"),
        ("[1]", "INVALID_ARGUMENT", "the line is no JSON object"),
        ("{}", "INVALID_ARGUMENT", "the line has no prompt; give exactly one of prompt, prompt_token_ids, messages"),
        ('{"prompt": "a", "messages": []}', "INVALID_ARGUMENT", "the line has prompt and messages"),
        ('{"prompt": ["a"]}', "INVALID_ARGUMENT", "prompt is ['a'], but must be text"),
        ('{"prompt_token_ids": "a"}', "INVALID_ARGUMENT", "prompt_token_ids is 'a', but must be a list"),
        ('{"prompt_token_ids": ["a"]}', "INVALID_ARGUMENT", "the prompt holds 'a' at position 0"),
        ('{"messages": ["a"]}', "INVALID_ARGUMENT", "messages holds 'a' at position 0"),
        ('{"prompt": "a", "max_token": 3}', "INVALID_ARGUMENT", "unknown sampling parameter max_token; did you mean max_tokens?"),
        ('{"prompt": "a", "temperature": -1}', "INVALID_ARGUMENT", "temperature"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "INVALID_ARGUMENT", "logit_bias has the key 'x'"),
        ('{"prompt": "a", "id": [1]}', "INVALID_ARGUMENT", "id is [1], but must be text or an integer"),
        ('{"prompt": ""}', "INVALID_ARGUMENT", "the prompt is empty; send at least one token"),
        ('{"prompt": "a", "request_id": "x", "timeout": -1}', "INVALID_ARGUMENT", "timeout is -1"),
        ("[" * 100_000, "INVALID_ARGUMENT", "the line is no JSON"),
        ('{"prompt": "a", "id": "\\ud800"}', "INVALID_ARGUMENT", "id is '\\ud800', which is not valid UTF-8 at character 0"),
        ('{"prompt": "a", "\\ud800": 1}', "INVALID_ARGUMENT", "unknown sampling parameter \ud800"),
        ('{"prompt": "a", "timeout": "abc"}', "INVALID_ARGUMENT", "timeout is 'abc', but must be a positive number of seconds"),
        ('{"prompt": "a", "timeout": true}', "INVALID_ARGUMENT", "timeout is True"),
        ('{"prompt": "a", "timeout": 1%s}' % ("0" * 400), "INVALID_ARGUMENT", "timeout is 1000"),
        ('{"prompt": "a", "timeout": 1e300}', "INVALID_ARGUMENT", "timeout is 1e+300"),
        ('{"prompt": "a", "request_id": 5}', "INVALID_ARGUMENT", "request_id is 5, but must be text"),
        ('{"prompt": "a", "request_id": 0}', "INVALID_ARGUMENT", "request_id is 0, but must be text"),
        ('{"prompt": "a", "request_id": "\\udfff"}', "INVALID_ARGUMENT", "request_id is '\\udfff', which is not valid UTF-8"),
        ('{"prompt_token_ids": [true]}', "INVALID_ARGUMENT", "the prompt holds True at position 0"),
        ('{"prompt": "a", "temperature": 1%s}' % ("0" * 400), "INVALID_ARGUMENT", "temperature is 1000"),
    ]
    text = "".join(f"{line}\n\n" for line, _, _ in bad) + lines([{"prompt": "AB", "max_tokens": 1}])
    result = batch("-", "--address", coordinator.address, stdin=text)
    assert result.exit_code == 1
    found = records(result.stdout)
    for index, (line, code, message) in enumerate(bad):
        number = 2 * index + 1  # every other line is blank
        assert (found[number]["line"], found[number]["error"]["code"]) == (number, code), line
        assert message in found[number]["error"]["message"]
    assert found[2 * len(bad) + 1]["text"] == "C"
    assert result.stderr.startswith(f"1 answered, {len(bad)} failed: ")


def test_an_id_that_is_used_twice_is_refused(coordinator: Coordinator) -> None:
    result = batch("-", "--address", coordinator.address, stdin=lines([{"prompt": "A", "id": "x"}, {"prompt": "B", "id": "x"}]))
    assert result.exit_code == 1
    answer, failure = sorted(map(json.loads, result.stdout.splitlines()), key=lambda record: "error" in record)
    assert answer["text"].startswith("BCD")
    assert failure["line"] == 2
    assert "the id 'x' is that of line 1 too" in failure["error"]["message"]


@pytest.mark.parametrize("keep_order", [False, True])
def test_order_of_results(coordinator: Coordinator, keep_order: bool) -> None:
    """The first request takes much longer than the others."""
    text = lines([{"prompt": "A", "max_tokens": 4000, "ignore_eos": True}, *({"prompt": "A", "max_tokens": 1} for _ in range(20))])
    result = batch("-", "--address", coordinator.address, "--max-concurrency", 4, *(["--keep-order"] if keep_order else []), stdin=text)
    ids = list(records(result.stdout))
    assert sorted(ids) == list(range(1, 22))
    assert (ids == sorted(ids)) is keep_order


def test_resume_answers_only_what_is_missing(coordinator: Coordinator, source: Path, tmp_path: Path) -> None:
    """What failed is tried again; a line that a crash cut short is dropped."""
    output = tmp_path / "results.jsonl"
    output.write_text(
        lines([{"id": "two", "text": "old", "token_ids": []}, {"id": 1, "line": 1, "error": {"code": "X", "message": ""}}]) + '{"id": 3, "te'
    )
    result = batch(source, "--output", output, "--resume", "--address", coordinator.address)
    assert result.exit_code == 0, result.stderr
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["id"], record.get("text")) for record in written[:2]] == [("two", "old"), (1, None)]
    assert sorted((record["id"], record["text"]) for record in written[2:]) == [(1, "CD"), (3, "Q")]
    assert result.stderr.startswith("2 answered, 0 failed, 1 skipped: ")
    again = batch(source, "--output", output, "--resume", "--address", coordinator.address)
    assert (again.exit_code, len(output.read_text().splitlines())) == (0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.jsonl"], "there is no file gone.jsonl"),
        (["-", "--resume"], "--resume needs --output"),
        (["-", "--output", "there"], "there exists; go on with it by --resume"),
        (["-", "--output", "no/folder/x"], "there is no folder"),
        (["-", "--max-concurrency", "0"], "--max-concurrency is 0, but must be from 1 to 4096"),
        (["-", "--max-tokens", "0"], "max_tokens is 0"),
    ],
)
def test_wrong_arguments_end_with_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").touch()
    result = batch(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.usefixtures("hasty")
def test_without_a_coordinator_it_ends(source: Path) -> None:
    result = batch(source, "--address", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "127.0.0.1:1" in result.stderr
    assert "(`specwire up` starts one on this machine, --address names another)" in result.stderr
    assert "0 answered, 0 failed" in result.stderr


@pytest.mark.usefixtures("hasty")
def test_a_full_queue_is_waited_for(coordinator: Coordinator, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the client itself tries, and only where the refusal is about the moment."""
    submit, num_refused = coordinator.engine.submit, 0

    def refuse_at_first(request: GenerateRequest, sink: Sink) -> ScriptedRequest:
        nonlocal num_refused
        if request.prompt_token_ids == [80]:
            raise ResourceExhaustedError("the request is too large; send a smaller one")
        if num_refused < 10:
            num_refused += 1
            raise ResourceExhaustedError("the queue is full; try again later", retry_after_ms=1)
        return submit(request, sink)

    monkeypatch.setattr(coordinator.engine, "submit", refuse_at_first)
    result = batch(source, "--address", coordinator.address)
    assert num_refused == 10
    assert records(result.stdout)[3]["error"] == {"code": "RESOURCE_EXHAUSTED", "message": "the request is too large; send a smaller one"}
    assert result.stderr.startswith("2 answered, 1 failed: ")


def test_ctrl_c_keeps_what_was_answered(coordinator: Coordinator) -> None:
    """Results are written as they come, also while standard input is open."""
    command = [sys.executable, "-m", "specwire.cli", "batch", "-", "--address", coordinator.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines([{"prompt": "AB", "max_tokens": 1}, {"prompt": "A", "max_tokens": 100_000_000, "ignore_eos": True}]))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["text"] == "C"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert stderr.startswith("1 answered, 0 failed: ")
    coordinator.wait_for_ends(2)
    assert coordinator.engine.requests[1].is_cancelled


@pytest.mark.parametrize("number", [signal.SIGINT, None], ids=["Ctrl-C", "error"])
def test_standard_input_that_waits_keeps_nothing_from_ending(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, number: signal.Signals | None
) -> None:
    """Nothing runs but the read of a next line, which never comes."""
    command = [sys.executable, "-m", "specwire.cli", "batch", "-", "--address", coordinator.address if number else "127.0.0.1:1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines([{"prompt": "AB", "max_tokens": 1}]))
        process.stdin.flush()
        if number:
            assert json.loads(process.stdout.readline())["text"] == "C"
            process.send_signal(number)
        status = process.wait(TIMEOUT_S)
        process.stdin.close()
        stderr = process.stderr.read() if process.stderr else ""
    assert status == (130 if number else 1), stderr
    assert "Fatal" not in stderr
    assert "Traceback" not in stderr
    assert number is not None or "127.0.0.1:1 can't be reached" in stderr


def test_a_closed_standard_input_is_named() -> None:
    command = [sys.executable, "-m", "specwire.cli", "batch", "-"]
    result = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 2
    assert "standard input, which is closed" in result.stderr


def test_jobs_are_read_lazily() -> None:
    """A file of any size takes little memory."""
    taken = 0

    def endless() -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield b'{"prompt": "a"}'

    jobs = read_jobs(endless())
    assert [next(jobs).id for _ in range(5)] == [1, 2, 3, 4, 5]
    assert taken == 5


def test_ordered_writing_holds_back_only_what_must_wait(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w") as stream:
        writer = Writer(stream, keep_order=True)
        for index in (2, 1):
            writer.write(index, {"id": index, "choices": []})
        assert path.read_text() == ""
        writer.write(0, {"id": 0, "token_ids": []})
        assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [0, 1, 2]
    assert answered_ids(path) == {0, 1, 2}
    path.write_text("[]\n")
    with pytest.raises(InvalidArgumentError, match=r"line 1 of .* is no result"):
        answered_ids(path)
