"""`specwire bench` as its user runs it, over a real coordinator: every count is the scripted services' own."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specwire.bench.backend import grpc_backend
from specwire.bench.runner import LoadGenerator
from specwire.bench.workload import Lengths, synthetic_prompts
from specwire.cli import app
from specwire.client import AsyncClient
from specwire.sampling_params import SamplingParams
from tests.bench.conftest import K, Served
from tests.coordinator.byte_tokenizer import EOS, VOCAB_SIZE
from tests.scripted.scripts import LETTERS

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_64_concurrent_requests_are_exact(served: Served) -> None:
    """Every answer is what the target alone gives, and the sum of what clients are told is what the verifier has counted."""
    prompts = synthetic_prompts(200, Lengths(12, 30, "uniform", 0.9), LETTERS, 0)

    async def main() -> Any:
        async with AsyncClient(served.address) as client:
            send = grpc_backend(client, SamplingParams(seed=5), label="test", report_drafts=True)
            return await LoadGenerator(send, asyncio.get_running_loop().time, max_concurrency=64, keep_tokens=True).run(prompts, None)

    records = asyncio.run(main()).records
    assert [record.error_text for record in records if not record.is_ok] == []
    for record in records:
        prompt = prompts[record.index]
        assert record.token_ids == served.expected(prompt.token_ids, prompt.max_tokens, 5 + record.index)
        assert record.usage.num_generated_tokens == record.num_output_tokens == len(record.token_ids) == prompt.max_tokens
        report, spec = record.drafts, record.spec
        assert (len(report.num_draft_tokens), sum(report.num_draft_tokens)) == (spec.num_drafts, spec.num_draft_tokens)
        assert (sum(report.num_accepted_tokens), len(report.confidences)) == (spec.num_accepted_tokens, spec.num_draft_tokens)
        assert set(report.confidences) <= {0.5}  # what the scripted drafter says of every draft
        assert [sum(count > position for count in report.num_accepted_tokens) for position in range(K)] == list(spec.accepted_per_position)
    assert sum(record.spec.num_draft_tokens for record in records) == served.verifier.num_draft_tokens > 0
    assert sum(record.spec.num_accepted_tokens for record in records) == served.verifier.num_accepted_tokens > 0


def test_serve(served: Served, tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    result = bench(
        "serve", "--address", served.address, "--num-prompts", 40, "--input-len", 10, "--prefix-len", 4, "--output-len", 20, "--max-concurrency", 8,
        "--warmup", 4, "--goodput", "ttft:100000 e2el:100000", "--percentiles", "50,99", "--output", output, "--save-detailed",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    for words in ("successful requests", "TTFT (ms)", "ITL per token (ms)", "p99", "acceptance length", "closed loop of 8", "request goodput"):
        assert words in result.stdout
    report = read(output)
    assert (report["completed"], report["failed"], report["total_input_tokens"], report["total_output_tokens"]) == (40, 0, 40 * 14, 800)
    assert report["request_goodput"] == pytest.approx(report["request_throughput"])
    assert (report["request_rate"], report["max_concurrency"], report["latencies_count_from"]) == ("inf", 8, "sending")
    assert 2 <= report["max_concurrent_requests"] <= 8
    assert report["num_token_itl"] == 40 * 19
    assert {"cpu", "cores"} <= set(report["machine"])
    assert report["versions"]["grpcio"]
    assert report["command"]
    requests = report["requests"]
    assert [entry["index"] for entry in requests] == list(range(40))
    assert all(sum(entry["chunk_sizes"]) == entry["output_len"] == 20 for entry in requests)
    assert sum(entry["num_drafts"] for entry in requests) == report["spec_decode_num_drafts"] > 0
    # The warm-up is not in it: 4 more requests of 20 tokens.
    assert report["spec_decode_draft_tokens"] < served.verifier.num_draft_tokens
    assert report["settings"]["params"]["seed"] == 0
    assert report["counted_by_client"] == report["counted_by_coordinator"]
    assert report["counted_by_client"]["generated_tokens"] == 800
    assert "the coordinator's own counters say the same" in result.stdout


def test_serve_a_prompt_file_at_a_rate_without_speculation(served: Served, tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    result = bench(
        "serve", "--address", served.address, "--prompts", PROMPTS, "--chat", "--num-prompts", 14, "--output-len", 5, "--request-rate", 200,
        "--burstiness", 2, "--max-draft-tokens", 0, "--temperature", 1, "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "nothing was drafted" in result.stdout
    report = read(output)
    assert (report["completed"], report["total_output_tokens"], report["latencies_count_from"]) == (14, 70, "scheduled arrival")
    assert (report["spec_decode_num_drafts"], served.verifier.num_draft_tokens) == (0, 0)
    assert "requests" not in report


def test_failed_requests_do_not_stop_the_run(served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts of more tokens than the model's context are refused one by one."""
    output = tmp_path / "serve.json"
    arguments = [
        "serve", "--address", served.address, "--num-prompts", 30, "--input-len", 450, "--length-distribution", "uniform", "--output-len", 2,
        "--max-concurrency", 4, "--output", output,
    ]  # fmt: skip
    result = bench(*arguments)
    report = read(output)
    assert (result.exit_code, report["completed"] + report["failed"], report["interrupted"]) == (1, 30, 0)
    assert report["errors_by_kind"] == {"InvalidArgumentError": report["failed"]}
    assert 0 < report["failed"] < 30
    assert "InvalidArgumentError" in result.stdout
    assert f"{report['failed']} of 30 requests failed with InvalidArgumentError; the first one: the prompt has " in caplog.text
    assert bench(*arguments, "--allow-errors").exit_code == 0


def test_a_late_answer_is_an_error_by_kind(served: Served, tmp_path: Path) -> None:
    served.verifier.script.delay_s = 0.05
    output = tmp_path / "serve.json"
    result = bench(
        "serve", "--address", served.address, "--num-prompts", 2, "--input-len", 4, "--output-len", 400, "--timeout", 0.2, "--output", output
    )
    assert (result.exit_code, read(output)["errors_by_kind"]) == (1, {"DeadlineExceededError": 2})


def test_ctrl_c_shows_what_was_measured(served: Served, tmp_path: Path) -> None:
    """One request answers; one that would take minutes is running when the signal comes."""
    output = tmp_path / "serve.json"
    served.verifier.script.delay_s = lambda _: 0.0 if served.verifier.num_rounds < 20 else interrupt()
    sent = threading.Event()

    def interrupt() -> float:
        if not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        return 0.1

    result = bench(
        "serve", "--address", served.address, "--num-prompts", 500, "--output-len", 10, "--max-concurrency", 1, "--output", output
    )  # fmt: skip
    assert result.exit_code == 130
    report = read(output)
    assert report["completed"] >= 1
    assert report["interrupted"] <= 1
    assert report["completed"] + report["interrupted"] < 500
    assert "interrupted requests" in result.stdout or not report["interrupted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_accept(served: Served, tmp_path: Path) -> None:
    output = tmp_path / "accept.json"
    result = bench(
        "accept", "--address", served.address, "--prompts", PROMPTS, "--categories", "coding,qa", "--weights", "coding=3,qa=1", "--output-len", 40,
        "--baseline", "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    for words in ("coding", "qa", "acceptance at position", "calibration of the drafter's raw scores", "4 of 4 answers have the same tokens"):
        assert words in result.stdout
    report = read(output)
    total, coding, qa = report["groups"]
    assert [group["name"] for group in report["groups"]] == ["total", "coding", "qa"]
    assert [group["prompts"] for group in report["groups"]] == [4, 3, 1]
    assert [group["weight"] for group in report["groups"]] == pytest.approx([4, 3, 1])
    # The run without drafts adds nothing to what was drafted.
    assert total["draft_tokens"] == coding["draft_tokens"] + qa["draft_tokens"] == served.verifier.num_draft_tokens
    assert total["accepted_tokens"] == served.verifier.num_accepted_tokens == sum(total["accepted_per_position"])
    by_hand = 1 + (3 / 3 * coding["accepted_tokens"] + qa["accepted_tokens"]) / (3 / 3 * coding["drafts"] + qa["drafts"])
    assert total["acceptance_length"] == pytest.approx(by_hand)
    [only_bin] = total["calibration"]["bins"]
    assert (only_bin["mean_score"], only_bin["num_observed"]) == (0.5, sum(entry["observed"] for entry in total["positions"]))
    assert total["calibration"]["expected_error"] == pytest.approx(abs(0.5 - only_bin["rate"]))
    assert (report["compared"], report["differences"]) == (4, [])


def test_accept_counts_differences(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that says something else without drafts, as none of ours may: it repeats one letter from the third token on."""
    emit, sample = served.verifier._emit, served.verifier.target.sample

    def emit_other(slot: Any, drafts: list[int]) -> Any:
        is_other = slot.open.sampling.max_draft_tokens == 0 and len(slot.prefix) >= slot.open.num_prompt_tokens + 2
        served.verifier.target.sample = (lambda _: ord("x")) if is_other else sample  # type: ignore[method-assign]
        return emit(slot, drafts)

    monkeypatch.setattr(served.verifier, "_emit", emit_other)
    output = tmp_path / "accept.json"
    arguments = ["--address", served.address, "--prompts", PROMPTS, "--num-prompts", 1, "--output-len", 10, "--max-concurrency", 1, "--baseline"]
    result = bench("accept", *arguments, "--output", output)
    assert result.exit_code == 1
    report = read(output)
    assert report["compared"] == 8  # one of each category
    assert len(report["differences"]) == 8
    assert all(2 <= difference["position"] <= 4 for difference in report["differences"])  # a letter may be right by chance
    assert "0 of 8 answers have the same tokens without drafts" in result.stdout
    assert "specbench/81 differs from token" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--request-rate", "0"], "--request-rate is 0"),
        (["serve", "--burstiness", "-1"], "--burstiness is -1"),
        (["serve", "--num-prompts", "0"], "--num-prompts is 0"),
        (["serve", "--max-concurrency", "0"], "--max-concurrency is 0"),
        (["serve", "--goodput", "itl:5"], "--goodput has 'itl:5'"),
        (["serve", "--percentiles", "101"], "--percentiles is '101'"),
        (["serve", "--length-distribution", "zipf"], "--length-distribution is 'zipf'"),
        (["serve", "--chat"], "--chat needs texts"),
        (["serve", "--timeout", "0"], "--timeout is 0"),
        (["serve", "--temperature", "-1"], "temperature is -1"),
        (["accept", "--prompts", "x", "--weights", "a"], "--weights has 'a'"),
        (["accept", "--prompts", "x", "--output-len", "0"], "--output-len is 0"),
        (["serve", "--tls-cert", "x"], "--tls-key"),
        (["accept", "--prompts", "x", "--tls-key", "x"], "--tls-cert"),
        (["accept"], "--prompts"),
        (["accept", "--prompts", "none.jsonl"], "the prompt file none.jsonl can't be read"),
        (["accept", "--prompts", PROMPTS, "--categories", "nocat"], "has no category 'nocat'"),
        (["accept", "--prompts", PROMPTS, "--weights", "codin=3"], "has no category 'codin'"),
        (["serve", "--prompts", "none.jsonl"], "the prompt file none.jsonl can't be read"),
        (["serve", "--output", "none/report.json"], "--output none/report.json can't be written"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_nothing_to_measure(served: Served, tmp_path: Path) -> None:
    """Status 1 and one line: no coordinator, or one that has no such tokens."""
    for arguments, message in (
        (["--address", f"unix:{tmp_path}/nobody", "--ready-timeout", "0.2"], "does not serve after 0.2 s"),
        (["--address", served.address, "--vocab-size", VOCAB_SIZE + 1], f"--vocab-size is {VOCAB_SIZE + 1}"),
    ):
        result = bench("serve", *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr


def test_made_up_prompts_hold_no_end_of_text(served: Served) -> None:
    from specwire.bench.targets import allowed_token_ids
    from tests.coordinator.byte_tokenizer import make_tokenizer

    allowed = allowed_token_ids(make_tokenizer(), 0)
    assert set(range(VOCAB_SIZE)) - set(allowed) == {EOS}
