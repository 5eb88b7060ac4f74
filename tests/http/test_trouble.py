"""Overload, a coordinator that is away, failures in the middle of an answer, requests that are no good, and the end of service."""

import asyncio
import gzip
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import openai
import pytest

from specwire import AsyncClient
from specwire.errors import InternalError, UnavailableError
from specwire.http.metrics import FAILED_STREAMS, STATUS_FAILURES
from specwire.messages import VerifyOpen
from tests.http.serving import Served, http_served, request
from tests.waiting import until

LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


async def test_overload_says_when_to_come_back(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.002}, coordinator={"max_num_seqs": 1, "max_queue": 1}) as served:
        running = [asyncio.create_task(served.post("/v1/completions", LONG))]
        await until(lambda: served.verifier.num_blocks_used > 0)
        running.append(asyncio.create_task(served.post("/v1/completions", LONG)))
        await until(lambda: len(served.engine._requests) == 2)
        for form in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
            answer = await served.post("/v1/completions", LONG | form)
            assert answer.status == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            await served.openai.completions.create(model="scripted", prompt="a")
        # Its own attempts, after what the header says, find room.
        patient = served.openai.with_options(max_retries=20)
        assert (await patient.completions.create(model="scripted", prompt="a", max_tokens=3)).choices[0].text
        assert [answer.status for answer in await asyncio.gather(*running)] == [200, 200]
        assert (await served.post("/v1/completions", LONG | {"n": 2})).status == 400, "it can never be served: coming back is of no use"
        await served.until_idle()


async def test_a_coordinator_that_is_away(socket_dir: Path) -> None:
    async with http_served(socket_dir, http={"coordinator": f"unix:{socket_dir}/nobody", "vllm_metrics": True}) as served:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            answer = await served.post(path, body)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (await served.get("/v1/models")).status == 503
        with pytest.raises(openai.InternalServerError):
            await served.openai.completions.create(model="scripted", prompt="a")
        metrics = await served.get("/metrics")
        assert b"specwire_http_running_requests 0.0" in metrics.body
        assert b"vllm:" not in metrics.body
        assert served.service.board.own(STATUS_FAILURES) == 1


async def test_readiness(served: Served) -> None:
    assert (await served.get("/health/live")).json == {"status": "live"}
    assert (await served.get("/health/ready")).status == 200
    served.service.serves = False
    answer = await served.get("/health/ready")
    assert answer.status == 503
    assert "coordinator" in answer.json["reason"]
    assert (await served.get("/health/live")).status == 200


@pytest.mark.parametrize("n", [1, 3])
async def test_a_failure_in_the_middle_is_an_event(socket_dir: Path, n: int) -> None:
    def is_bad(opened: VerifyOpen, index: int) -> bool:
        return opened.choice == n - 1 and index == 30

    async with http_served(socket_dir, verifier={"is_bad": is_bad}) as served:
        answer = await served.post("/v1/completions", LONG | {"stream": True, "n": n})
        assert answer.status == 200
        *parts, last = answer.events
        assert parts
        assert last["error"]["type"] == "internal_error"
        assert served.service.board.own(FAILED_STREAMS) == 1
        with pytest.raises(openai.APIError, match="logits"):
            async for _ in await served.openai.completions.create(model="scripted", prompt="a", max_tokens=400, n=n, stream=True):
                pass
        whole = await served.post("/v1/completions", LONG | {"n": n})
        assert whole.status == 500
        assert "logits" in whole.json["error"]["message"]
        await served.until_idle()


async def test_a_fault_of_the_service_is_no_secret(served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("specwire.http.formats.CompletionFormat.part", fail)
    answer = await served.post("/v1/completions", LONG | {"stream": True})
    assert answer.status == 500
    assert "ZeroDivisionError" in answer.json["error"]["message"]
    monkeypatch.setattr("specwire.http.formats.CompletionFormat.choice", fail)
    assert (await served.post("/v1/completions", {"prompt": "a"})).status == 500
    assert "unexpected error in /v1/completions" in caplog.text
    await served.until_idle()


async def test_requests_that_are_none(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with http_served(socket_dir, http={"max_body_mb": 1}) as served:
        for body in (b"{", b"\xff", b"[" * 100_000, b"3"):
            assert (await served.post("/v1/completions", body)).status == 400
        assert (await served.post("/v1/completions", b"{}", content_type="text/plain")).status == 415
        assert (await served.call("POST", "/v1/completions", b"{}")).status == 415
        packed = await served.post("/v1/completions", gzip.compress(b'{"prompt": "a"}'), content_encoding="gzip")
        assert (packed.status, packed.json["error"]["message"]) == (
            415,
            "the body's Content-Encoding is 'gzip', but bodies are read as they are; send it without compression",
        )
        upgrade = await served.get("/health", connection="close, upgrade", upgrade="websocket")
        assert (upgrade.status, caplog.text.count("websockets")) == (200, 0)
        assert (await served.call("CONNECT", "x:80")).status == 400
        large = json.dumps({"prompt": "a" * (1 << 20)}).encode()
        assert (await served.post("/v1/completions", large)).status == 413
        chunked = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(chunked + b"".join(b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16)) for _ in range(17)) + b"0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 413")
        writer.close()
        assert (await served.get("/v1/completions")).status == 405
        missing = await served.post("/v1/nothing", {})
        assert (missing.status, missing.json["error"]["code"]) == (404, "unknown_url")
        for value in ("\ud800", "a\ud800"):
            for body in ({"prompt": value}, {"prompt": "a", "stop": value}, {"prompt": "a", "model": value}, {"prompt": "a", "user": value}):
                answer = await served.post("/v1/completions", body)
                assert answer.status in (400, 404), body
        await served.until_idle()


async def test_grpc_clients_do_not_flood_the_log(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with http_served(socket_dir) as served:
        for _ in range(3):
            client = AsyncClient(f"127.0.0.1:{served.port}", max_retries=0)
            with pytest.raises(UnavailableError, match="speaks no gRPC"):
                await client.get_status()
            await client.close()
    [line] = [line for line in caplog.messages if "request" in line]
    assert "no HTTP/1.1 request for this service, and was answered with 400; a gRPC client needs the coordinator's port" in line


async def test_ids_of_answers(served: Served) -> None:
    answer = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "user": "me"}, x_request_id="mine")
    assert answer.json["id"] == answer.headers["x-request-id"] == "cmpl-mine"
    answer = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, x_request_id="x" * 1000)
    assert answer.json["id"] == f"cmpl-{'x' * 64}"


async def test_web_pages_may_not_call_unless_they_are_named(socket_dir: Path) -> None:
    ask = {"origin": "https://chat.example.com", "access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    async with http_served(socket_dir) as served:
        assert "access-control-allow-origin" not in (await served.call("OPTIONS", "/v1/completions", **ask)).headers
        assert "access-control-allow-origin" not in (await served.get("/v1/models", origin=ask["origin"])).headers
    async with http_served(socket_dir, http={"cors_origins": (ask["origin"],)}) as served:
        assert (await served.call("OPTIONS", "/v1/completions", **ask)).headers["access-control-allow-origin"] == ask["origin"]
        assert (await served.get("/v1/models", origin=ask["origin"])).headers["access-control-allow-origin"] == ask["origin"]
        assert (await served.call("OPTIONS", "/v1/completions", **ask | {"origin": "https://other.example.com"})).status == 400


async def test_streams_end_within_the_grace(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.002}) as served:
        stream = asyncio.create_task(served.post("/v1/completions", LONG | {"stream": True, "seed": 1}))
        await until(lambda: served.service.lifetime.num_running == 1)
        draining = asyncio.create_task(served.service.lifetime.drain(60))
        await until(lambda: served.service.lifetime.is_draining)
        refused = await served.post("/v1/completions", LONG)
        assert (refused.status, refused.headers["connection"], refused.headers["retry-after"]) == (503, "close", "1")
        assert (await served.get("/health/ready")).status == 503
        assert (await served.get("/metrics")).status == 200
        text = "".join(event["choices"][0]["text"] for event in (await stream).events)
        assert text == bytes(served.verifier.target.generate([97], 400, 1)).decode()
        await draining


@pytest.mark.parametrize("length", [500, 40 << 20], ids=["body", "too large a body"])
async def test_a_body_that_never_ends_does_not_outlast_the_grace(socket_dir: Path, length: int) -> None:
    async with http_served(socket_dir) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{{".encode())
        await until(lambda: served.service.lifetime.num_running == 1)
        await served.service.lifetime.drain(0)
        status = await reader.readline()
        assert status.startswith(b"HTTP/1.1 503" if length < 1000 else b"HTTP/1.1 413")
        writer.close()


async def test_after_the_grace_what_still_runs_is_told(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.05}) as served:
        requests = [asyncio.create_task(served.post("/v1/completions", LONG | {"stream": is_streamed})) for is_streamed in (True, False)]
        await until(lambda: len(served.engine._requests) == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("POST", "/v1/completions", json.dumps(LONG | {"stream": True}).encode(), content_type="application/json"))
        await reader.readuntil(b"data: ")
        await served.service.lifetime.drain(0)
        assert b"error" in await reader.read()
        writer.close()
        streamed, whole = await asyncio.gather(*requests)
        assert whole.status == 503
        assert streamed.status == 503 or streamed.events[-1]["error"]["type"] == "service_unavailable_error"
        await served.until_idle()


def test_internal_errors_are_500() -> None:
    from specwire.http.failures import refusal_of

    assert refusal_of(InternalError("x"), {}).status == 500


async def test_the_schema_has_the_parameters(served: Served) -> None:
    schema = (await served.get("/openapi.json")).json
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "max_draft_tokens"} <= body["properties"].keys()
    assert (await served.get("/version")).json["version"]
    assert (await served.get("/docs")).status == 404


async def test_without_a_tokenizer(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"tokenizer": None}) as served:
        ids = await served.post("/v1/completions", {"prompt": [97], "max_tokens": 9, "seed": 1, "return_token_ids": True})
        assert ids.json["choices"][0]["token_ids"] == served.verifier.target.generate([97], 9, 1)
        wanted = {"prompt": [97], "return_token_ids": True}
        wrong = [({"prompt": [97]}, "return_token_ids"), (wanted | {"prompt": "a"}, "prompt"), (wanted | {"echo": True}, "echo")]
        for body, param in [*wrong, (wanted | {"bad_words": ["a"]}, "bad_words")]:
            answer = await served.post("/v1/completions", body)
            assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert (await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True})).status == 400
        assert (await served.post("/tokenize", {"prompt": "a"})).status == 400


@pytest.mark.parametrize("cuts", [(), (40,), (90, 150), range(1, 400, 7)])
async def test_who_would_rather_have_another_protocol_gets_the_same_answers(socket_dir: Path, cuts: Iterable[int]) -> None:
    """As Java's client asks for HTTP/2; whatever parts its requests come in, one after the other."""
    body = json.dumps({"prompt": "a", "max_tokens": 5, "seed": 1}).encode()
    wish = {"upgrade": "h2c", "http2_settings": "AAEAAEAAAAIAAAAB"}
    async with http_served(socket_dir) as served:
        plain = await served.post("/v1/completions", body)
        post = request("POST", "/v1/completions", body, content_type="application/json", connection="Upgrade, HTTP2-Settings", **wish)
        chunked = post.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked").removesuffix(body)
        chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        last = request("GET", "/health", connection="close, Upgrade", **wish)
        everything = post + chunked + post + last
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        for start, end in itertools.pairwise([0, *cuts, len(everything)]):
            writer.write(everything[start:end])
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            answers = await reader.read()
        writer.close()
        text = json.dumps(plain.json["choices"][0]["text"]).encode()
        assert (answers.count(b"HTTP/1.1 200"), answers.count(b'"text":' + text)) == (4, 3), answers
        await served.until_idle()
