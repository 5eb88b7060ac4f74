"""API keys and TLS: as over gRPC."""

import asyncio
import json
import logging
import ssl
from pathlib import Path
from typing import Any

import openai
import pytest

from specwire.config import HttpConfig
from specwire.http.upstream import MAX_IDLE_CLIENTS
from tests.http.serving import front, http_served, request
from tests.security.certificates import Authority, Pair
from tests.security.key_file import KEY, OTHER_KEY, File, entry
from tests.waiting import until

BODY = {"prompt": "a", "max_tokens": 4}


@pytest.fixture
def keys(tmp_path: Path) -> File:
    file = File(tmp_path / "keys.yaml")
    file.write(entry(max_tokens_per_request=50), entry("red", OTHER_KEY))
    return file


async def test_only_callers_with_a_key(socket_dir: Path, keys: File, monkeypatch: pytest.MonkeyPatch) -> None:
    # The process's own key is nobody else's.
    monkeypatch.setenv("SPECWIRE_API_KEY", OTHER_KEY)
    async with http_served(socket_dir, coordinator={"api_keys": keys.path}, http={"vllm_metrics": True}, api_key=KEY) as served:
        assert (await served.openai.completions.create(model="scripted", prompt="a", max_tokens=4)).choices[0].text
        for header in (None, "Bearer wrong", f"Basic {KEY}", "Bearer", f"Bearer {KEY} {KEY}", "Bearer \u00e4"):
            headers = {} if header is None else {"authorization": header}
            for answer in (
                await served.post("/v1/completions", BODY, **headers),
                await served.post("/v1/completions", BODY | {"stream": True}, **headers),
                await served.post("/tokenize", {"prompt": "a"}, **headers),
                await served.get("/v1/models", **headers),
            ):
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), header
                assert answer.json["error"]["code"] == "invalid_api_key"
                assert OTHER_KEY not in answer.body.decode()
        with pytest.raises(openai.AuthenticationError):
            await served.openai.with_options(api_key="wrong").models.list()
        # Beyond what the key may ask for: coming back is of no use.
        with pytest.raises(openai.BadRequestError, match="max_tokens_per_request"):
            await served.openai.completions.create(model="scripted", prompt="a", max_tokens=60)
        for path in ("/health/live", "/health/ready", "/version"):
            assert (await served.get(path)).status == 200
        assert b"vllm:num_requests_running" in (await served.get("/metrics")).body
        await served.until_idle()


async def test_limits_of_the_moment(socket_dir: Path, keys: File) -> None:
    keys.write(entry(requests_per_minute=2))
    async with http_served(socket_dir, coordinator={"api_keys": keys.path}, api_key=KEY) as served:
        for _ in range(2):
            await served.openai.completions.create(model="scripted", prompt="a", max_tokens=4)
        with pytest.raises(openai.RateLimitError) as caught:
            await served.openai.completions.create(model="scripted", prompt="a", max_tokens=4)
        assert 25 <= int(caught.value.response.headers["retry-after"]) <= 31


async def test_connections_of_many_keys_are_bounded(socket_dir: Path) -> None:
    async with http_served(socket_dir) as served:
        for number in range(MAX_IDLE_CLIENTS + 20):
            with served.upstream.caller(f"Bearer key-{number}"):
                pass
        assert len(served.upstream._callers) == MAX_IDLE_CLIENTS
        assert (await served.post("/v1/completions", BODY, authorization="Bearer key-0")).status == 200


async def test_equal_tokenizers_are_loaded_once(socket_dir: Path) -> None:
    async with http_served(socket_dir) as served:
        tokenizers = []
        for number in range(3):
            with served.upstream.caller(f"Bearer key-{number}") as caller:
                tokenizers.append(await caller.tokenizer())
        assert tokenizers[0] is not None
        assert tokenizers[0] is tokenizers[1] is tokenizers[2]


def write_rubbish(pair: Pair) -> None:
    Path(pair.key).write_text("rubbish")


async def call(port: int, context: ssl.SSLContext) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(request("POST", "/v1/completions", json.dumps(BODY).encode(), content_type="application/json"))
    answer = await reader.read()
    certificate: Any = writer.get_extra_info("peercert")
    writer.close()
    return {"status": int(answer.split()[1]), "serial": certificate["serialNumber"]}


async def test_tls_with_certificates_that_change(socket_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specwire.http.sockets")
    authority = Authority(tmp_path)
    first, second, client = authority.issue("first"), authority.issue("second"), authority.issue("client")
    served_pair = authority.issue("served")
    served_pair.replace_with(first)
    context = ssl.create_default_context(cafile=authority.file)
    tls: dict[str, Any] = {"tls_cert": served_pair.cert, "tls_key": served_pair.key, "tls_ca": authority.file, "tls_client_auth": True}
    async with http_served(socket_dir) as backend:
        address = f"unix:{socket_dir}/coordinator.sock"
        async with front(HttpConfig(listen=("127.0.0.1:0",), coordinator=address, **tls)) as secure:
            assert backend.url.startswith("http:")
            assert secure.url.startswith("https:")
            with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
                await call(secure.port, context)
            context.load_cert_chain(client.cert, client.key)
            answer = await call(secure.port, context)
            assert answer["status"] == 200
            write_rubbish(served_pair)
            await until(lambda: "the changed TLS files are not used" in caplog.text)
            assert await call(secure.port, context) == answer
            served_pair.replace_with(second)
            await until(lambda: "are used from now on" in caplog.text)
            assert (await call(secure.port, context))["serial"] != answer["serial"]


async def test_the_coordinator_with_tls(socket_dir: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tls = {"listen": ("127.0.0.1:0",), "tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": authority.file, "tls_client_auth": True}
    async with http_served(socket_dir, coordinator=tls, http={"coordinator_tls_ca": authority.file, "coordinator_tls_cert": pair.cert,
                                                              "coordinator_tls_key": pair.key}) as served:  # fmt: skip
        assert (await served.post("/v1/completions", BODY)).status == 200
