"""Every example runs as it is against a served coordinator, and says what it should."""

import json
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.served import Served, served

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_LINES = 40
Run = Callable[..., str]


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="sw-") as folder, served(Path(folder)) as coordinator:
        yield coordinator


@pytest.fixture
def run(coordinator: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with arguments as a program; what it prints."""

    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--address", coordinator.address])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        output = capsys.readouterr()
        assert output.err == ""
        return output.out

    return run_example


def test_quickstart(run: Run) -> None:
    lines = run("quickstart.py").splitlines()
    assert re.fullmatch("[a-z ]{32}", lines[0])
    assert re.fullmatch(r"32 tokens, then length; \d+ steps of the target; acceptance length [1-6]\.\d\d", lines[1])


def test_streaming(run: Run) -> None:
    output = run("streaming.py", "-n", "2", "A prompt ")
    assert output.count("length") == 2
    assert output.count("A prompt ") == 2
    assert len(re.findall("[a-z]", output)) > 60


def test_batch(run: Run, tmp_path: Path) -> None:
    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}]}, {"prompt": "x" * 5000}, {"prompt": "three"}]
    questions.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SystemExit) as status:
        run("batch.py", str(questions), str(answers))
    assert status.value.code == 1
    outcomes = {line["index"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert all(len(outcomes[index]["text"]) == 64 for index in (0, 1, 3))
    assert "the prompt has 5000 tokens" in outcomes[2]["error"]


def test_chat(run: Run, coordinator: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "and then"])

    def say(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", say)
    answers = run("chat.py", "--system", "Be brief.").splitlines()
    assert [len(answer) for answer in answers] == [256, 256]
    prompts = [bytes(request.prompt_token_ids).decode() for request in coordinator.requests[-2:]]
    assert prompts[0] == "<system>Be brief.<user>hello<assistant>"
    assert prompts[1] == f"<system>Be brief.<user>hello<assistant>{answers[0]}<user>and then<assistant>"


def test_many(run: Run) -> None:
    lines = run("async_many.py").splitlines()
    assert lines[0] == "20 answers, 160 tokens"
    assert lines[1].startswith(("deadline: the generation did not end", "deadline: timeout_ms is", "the story was done in time"))
    assert lines[2] == "the endless one: CancelledError"


def test_logprobs(run: Run) -> None:
    lines = run("logprobs.py").splitlines()
    assert len(lines) == 16
    assert all(re.match(r"'[a-z ]' +\d+% (draft)? +else ", line) for line in lines), lines
    assert any("draft" in line for line in lines)


def test_trace(run: Run, coordinator: Served) -> None:
    lines = run("trace.py").splitlines()
    assert re.fullmatch("[a-z ]{32}", lines[0])
    trace_id = re.fullmatch("trace id ([0-9a-f]{32})", lines[1])
    assert trace_id is not None
    assert coordinator.requests[-1].traceparent.split("-")[1] == trace_id[1]


def test_every_example_is_short_and_tested() -> None:
    examples = {path.name for path in EXAMPLES.glob("*.py")}
    assert examples == set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    for name in examples:
        lines = (EXAMPLES / name).read_text().splitlines()
        assert len(lines) < MAX_LINES, f"{name} is long for an example"
        assert not [line for line in lines if re.match(r"(from|import) specwire\.", line)], f"{name} imports more than the public names"
