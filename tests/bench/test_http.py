"""`specwire bench serve` over HTTP: our own service, and a server that answers as other engines do, well and badly."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specwire.bench.http_client import HttpClient
from specwire.bench.http_target import HttpTarget, parse_speculation
from specwire.bench.metrics import measure, to_figures
from specwire.bench.record import RequestRecord
from specwire.bench.serve import run_target
from specwire.bench.serve_options import ServeOptions
from specwire.bench.serve_report import ServeResult, make_report
from specwire.bench.workload import Lengths, PromptLine
from specwire.cli import app
from specwire.errors import InvalidArgumentError, SpecwireError, UnavailableError
from specwire.messages import SpecStats
from specwire.sampling_params import SamplingParams
from tests.coordinator.byte_tokenizer import VOCAB_SIZE
from tests.http.serving import http_served

LINES = [PromptLine(str(index), text, "", 1.0) for index, text in enumerate(("first question", "second", "a third one"))]
PARAMS = SamplingParams(seed=0)


def options(**fields: Any) -> ServeOptions:
    return ServeOptions(**{"address": "", "params": PARAMS, "max_concurrency": 4, "ready_timeout_s": 5.0} | fields)


async def run(url: str, asked: ServeOptions, lines: list[PromptLine] | None = None, **target: Any) -> ServeResult:
    return await run_target(asked, lines, lambda: HttpTarget(HttpClient(url), is_chat=asked.chat, **target))


async def test_made_up_prompts_are_exact(socket_dir: Path) -> None:
    """Counts are those of the services, whatever comes together in one event."""
    asked = options(
        num_prompts=20, lengths=Lengths(10, 30, "uniform", 0.5), vocab_size=VOCAB_SIZE, num_warmups=3, save_detailed=True,
        params=PARAMS.replace(ignore_eos=True),
    )  # fmt: skip
    async with http_served(socket_dir, http={"vllm_metrics": True}) as served:
        result = await run(f"{served.url}/v1", asked)
        await served.until_idle()
        assert (result.backend, result.model_id, result.address) == ("openai", "scripted", served.url)
        metrics = measure(result.run, (50, 99))
        assert (metrics.num_completed, metrics.num_failed) == (20, 0)
        assert result.speculation is not None
        warmed = served.verifier.num_draft_tokens - result.speculation.num_draft_tokens
        assert 0 < warmed < result.speculation.num_draft_tokens
    report = make_report(asked, {}, result, metrics)
    assert report["total_output_tokens"] == sum(report["output_lens"]) == sum(sum(record.chunk_sizes) for record in result.run.records)
    assert {len(record.token_ids) for record in result.run.records} == set(report["output_lens"])
    assert all(5 <= length <= 15 for length in report["input_lens"])
    assert [bool(text) for text in report["generated_texts"]] == [True] * 20
    assert report["errors"] == [""] * 20
    json.dumps(report, allow_nan=False)


async def test_the_same_load_gives_the_same_tokens_as_grpc(socket_dir: Path) -> None:
    from specwire.bench.targets import GrpcTarget
    from specwire.client import AsyncClient

    asked = options(num_prompts=6, lengths=Lengths(8, 20), vocab_size=200, save_detailed=True)
    async with http_served(socket_dir) as served:
        over_http = await run(served.url, asked)
        address = f"unix:{socket_dir}/coordinator.sock"
        over_grpc = await run_target(asked, None, lambda: GrpcTarget(AsyncClient(address), address))
    answers = [[record.token_ids for record in sorted(result.run.records, key=lambda each: each.index)] for result in (over_http, over_grpc)]
    assert answers[0] == answers[1]
    assert over_http.texts == [None] * 6
    assert ["".join(record.texts) for record in over_http.run.records] == list(over_grpc.texts)
    assert (over_http.server, over_http.speculation) == (None, None)  # without vLLM's names there is nothing to read


async def test_texts_and_chats_are_encoded_there(socket_dir: Path) -> None:
    async with http_served(socket_dir) as served:
        for is_chat in (False, True):
            result = await run(served.url, options(chat=is_chat, prompts=Path("x"), lengths=Lengths(1, 5), num_prompts=4), LINES)
            records = sorted(result.run.records, key=lambda each: each.index)
            assert [record.error_text for record in records] == [""] * 4
            lengths = [record.num_prompt_tokens for record in records]
            assert lengths[0] == lengths[3] > lengths[1]
            assert (lengths[1] == len("second")) is not is_chat
            assert {record.finish_reason for record in records} <= {"length", "stop"}


async def test_a_refused_request_is_an_error_by_kind(socket_dir: Path) -> None:
    async with http_served(socket_dir) as served:
        result = await run(served.url, options(num_prompts=3, lengths=Lengths(3000, 5), vocab_size=VOCAB_SIZE))
        assert measure(result.run, (50,)).errors == {"InvalidArgumentError": 3}
        assert "status 400: " in result.run.records[0].error_text
        with pytest.raises(InvalidArgumentError, match="has no model 'other'; it has scripted"):
            await run(served.url, options(), model="other")
        with pytest.raises(InvalidArgumentError, match="--vocab-size, or texts with --prompts"):
            await run(served.url, options())


class Engine:
    """A server of another engine: what it answers to a completion is a list of raw pieces; None closes the connection there."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []
        self.num_connections = 0
        self._tasks: list[asyncio.Task[Any]] = []

    async def ended(self) -> None:
        """Clients have left."""
        await asyncio.gather(*self._tasks)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).strip():
                if head.startswith(b"GET /prefix/v1/models "):
                    pieces: list[bytes | None] = [whole(200, {"data": [{"id": "m"}]})]
                elif head.startswith(b"GET "):
                    pieces = [whole(404, {})]
                else:
                    size = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))[16:])
                    self.bodies.append(json.loads(await reader.readexactly(size)))
                    pieces = self.answers.pop(0)
                for piece in pieces:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(engine: Engine) -> AsyncIterator[str]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix"
    finally:
        server.close()
        await engine.ended()


def whole(status: int, body: object, **headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(content)}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str = "", reason: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "text": text, "finish_reason": reason}] if text or reason else []
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


GOOD: list[bytes | None] = [
    HEAD, chunk(event("one")), chunk(b": a comment\n\n" + event("two")[:9]), chunk(event("two")[9:] + event("three", "length")),
    chunk(event(usage={"prompt_tokens": 7, "completion_tokens": 8})), chunk(b"data: [DONE]\n\n"), END,
]  # fmt: skip


async def answers(engine: Engine, num_prompts: int = 1, **fields: Any) -> list[RequestRecord]:
    async with listening(engine) as url:
        asked = options(num_prompts=num_prompts, vocab_size=50, lengths=Lengths(4, 8), max_concurrency=1, **fields)
        return (await run(url, asked, extra_body={"top_k": 5, "temperature": 0.5})).run.records


async def test_another_engine() -> None:
    """Without token ids the tokens that it names at the end are spread over the chunks; one connection is enough; unknown keys stay out."""
    engine = Engine(GOOD, GOOD)
    records = await answers(engine, 2)
    assert [(record.error, record.chunk_sizes, record.num_prompt_tokens, record.finish_reason) for record in records] == [
        ("", [2, 3, 3], 7, "length")
    ] * 2
    assert ["".join(record.texts) for record in records] == ["onetwothree"] * 2
    assert engine.num_connections == 1
    assert engine.bodies[1].pop("prompt") != engine.bodies[0]["prompt"]
    assert engine.bodies[1] == {
        "model": "m", "max_tokens": 8, "temperature": 0.5, "top_p": 1.0, "top_k": 5, "seed": 1, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ([whole(400, {"error": {"message": "no such thing"}})], "InvalidArgumentError", "status 400: no such thing"),
        ([whole(500, "oh")], "InternalError", 'status 500: "oh"'),
        ([whole(401, {"error": "who?"})], "UnauthenticatedError", "status 401: who?"),
        ([whole(429, {}, retry_after="2")], "ResourceExhaustedError", "status 429: {}"),
        ([HEAD, chunk(event("one")), None], "UnavailableError", "closed the connection before its answer ended"),
        ([HEAD, chunk(event("one", "stop")), END], "UnavailableError", "without [DONE]"),
        ([HEAD, chunk(event("one")), chunk(event(error={"message": "lost"})), chunk(b"data: [DONE]\n\n"), END], "InternalError", "lost"),
        ([HEAD, chunk(b"data: {]\n\n"), END], "InternalError", "no JSON"),
        ([HEAD, chunk(b"data: [DONE]\n\n"), END], "InternalError", "ended with 0 tokens"),
        ([b"SSH-2.0\r\n\r\n"], "UnavailableError", "is no HTTP"),
    ],
)  # fmt: skip
async def test_what_goes_wrong_is_a_result(answer: list[bytes | None], kind: str, text: str) -> None:
    """And the next request is answered."""
    first, second = await answers(Engine(answer, GOOD), 2)
    assert (first.error, second.error) == (kind, "")
    assert text in first.error_text


async def test_retries_wait_as_the_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int | None] = []

    def pause(error: SpecwireError, own_s: float) -> float:
        pauses.append(error.retry_after_ms)
        return 0.0

    monkeypatch.setattr("specwire.client.generation.pause_before_retry", pause)
    refusals: list[list[bytes | None]] = [[whole(429, {}, retry_after="2")], [whole(503, {})]]
    [record] = await answers(Engine(*refusals, GOOD), max_retries=2)
    assert (record.error, record.num_retries, pauses) == ("", 2, [2000, None])


async def test_a_late_answer_fails_and_gives_its_connection_up() -> None:
    engine = Engine([HEAD, chunk(event("one"))], GOOD)
    first, second = await answers(engine, 2, timeout_s=0.5)
    assert (first.error, second.error, engine.num_connections) == ("DeadlineExceededError", "", 2)


async def test_a_connection_that_the_server_has_closed_is_replaced() -> None:
    engine = Engine([*GOOD, None], GOOD, [None], [None], GOOD)
    records = await answers(engine, 4)
    assert [record.error for record in records] == ["", "", "UnavailableError", ""]
    assert engine.num_connections == 4  # a new one that is closed, too, is not tried again


async def test_nobody_there() -> None:
    with pytest.raises(UnavailableError, match=r"does not serve after 0.3 s: .*can't be reached"):
        await run("http://127.0.0.1:9", options(ready_timeout_s=0.3))


def test_speculation_of_an_exposition() -> None:
    text = b"""\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
"""
    assert parse_speculation(text) == SpecStats(10, 30, 12, (8, 4))
    assert parse_speculation(b"other 1.0\n") is None


def test_keys_are_those_of_vllm() -> None:
    """What `vllm bench serve` writes always, for completions; date is the environment's, request_rate to max_concurrency the settings'."""
    keys = {
        "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
        "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
        "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "spec_decode_acceptance_rate",
        "spec_decode_acceptance_length", "spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens",
        "spec_decode_per_position_acceptance_rates",
    }  # fmt: skip
    from specwire.bench.runner import LoadRun

    run = LoadRun([], 0.0, 0.0)
    result = ServeResult("openai", "http://x", "m", run, None, None, 0.0)
    assert keys <= set(make_report(options(), {}, result, measure(run, (50,))))
    assert "errors" not in to_figures(measure(run, (50,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "http"], "--backend is 'http'"),
        (["--base-url", "http://x"], "--base-url goes with HTTP"),
        (["--backend", "openai", "--base-url", "x:8000"], "--base-url is 'x:8000'"),
        (["--backend", "openai", "--extra-body", "[1]"], "--extra-body is '[1]'"),
        (["--backend", "openai", "--extra-body", "{"], "must be JSON"),
        (["--backend", "openai", "--base-url", "https://x", "--tls-ca", "none.pem"], "none.pem"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
