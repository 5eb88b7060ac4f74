"""How the service follows its coordinator: gone and back, and with certificates that change meanwhile."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from coordinator.server import CoordinatorServer
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, HttpConfig
from specwire.http.upstream import Upstream
from specwire.messages import TokenizerSpec
from specwire.tls import TlsOptions
from specwire.tokenizer import fingerprint
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving
from tests.http.serving import Served
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import ScriptedVerifier
from tests.security.certificates import Authority, copy
from tests.waiting import until

TIMEOUT_S = 50.0


async def following(changes: AsyncGenerator[bool, None]) -> bool:
    async with asyncio.timeout(TIMEOUT_S):
        return await anext(changes)


async def test_a_coordinator_that_goes_and_comes_back(socket_dir: Path) -> None:
    async with AsyncClient(f"unix:{socket_dir}/coordinator.sock") as client:
        changes = client.watch_serving()
        for _ in range(2):
            engine = ScriptedEngine(make_spec())
            async with serving(engine, socket_dir):
                while not await following(changes):
                    pass
                engine.set_ready(False, "nothing to serve with")
                assert not await following(changes)
                engine.set_ready(True)
                assert await following(changes)
            assert not await following(changes), "it went away"
        await changes.aclose()


async def test_new_certificates_reach_a_coordinator_that_wants_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.client.service._RENEWAL_S", 0.2)
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair, trusted = new.issue("server"), tmp_path / "trusted.pem"
    copy(old.file, str(trusted))
    server = CoordinatorServer(
        ScriptedEngine(make_spec()),  # type: ignore[arg-type]
        CoordinatorConfig(listen=("127.0.0.1:0",), tls_cert=pair.cert, tls_key=pair.key),
    )
    await server.start()
    follower = asyncio.create_task(server.follow_readiness())
    async with AsyncClient(server.bound_addresses[0], tls=TlsOptions(str(trusted))) as client:
        changes = client.watch_serving()
        asking = asyncio.create_task(following(changes))
        assert not (await asyncio.wait([asking], timeout=0.5))[0]
        copy(new.file, str(trusted))
        while not await asking:
            asking = asyncio.create_task(following(changes))
        await changes.aclose()
    follower.cancel()
    await server.stop(0)


async def test_the_tokenizer_is_there_before_the_first_request(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(ScriptedEngine(make_spec()), socket_dir) as server:
        upstream = Upstream(HttpConfig(coordinator=server.bound_addresses[0]))
        await upstream.prepare()
        monkeypatch.setattr("specwire.client.connection._load_tokenizer", lambda _: pytest.fail("it is loaded once more"))
        with upstream.caller("Bearer some") as caller:
            assert await caller.tokenizer() is await upstream.own.get_tokenizer()
        await upstream.close()


async def test_without_a_tokenizer_or_a_coordinator_it_goes_on(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "specwire.http.upstream")
    async with serving(ScriptedEngine(None), socket_dir) as server:
        upstream = Upstream(HttpConfig(coordinator=server.bound_addresses[0]))
        await upstream.prepare()
        await upstream.close()
    assert "tokenizer" not in caplog.text
    upstream = Upstream(HttpConfig(coordinator=f"unix:{socket_dir}/nobody"))
    await upstream.prepare()
    assert "the tokenizer is loaded with the first request that needs it" in caplog.text
    await upstream.close()


async def test_another_model_is_known_at_once_also_to_who_only_tokenized(served: Served) -> None:
    """Its name and its tokenizer are those of the requests from then on, whatever was asked before."""
    assert (await served.post("/tokenize", {"prompt": "ab"})).json["tokens"] == [97, 98]
    other = _swapped(make_spec())
    served.network.put("d:1", ScriptedDrafter(byte_drafter_script(tokenizer_fingerprint=other.fingerprint)))
    served.network.put("v:1", ScriptedVerifier(byte_verifier_script(model_id="other", weights_hash="others", tokenizer=other)))
    await until(lambda: _name(served) == "other" and served.engine.ready.is_ready, TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):  # less than what is fetched once stays fresh; the end of a stream takes its time to arrive
        while (await served.post("/tokenize", {"prompt": "ab"})).json["tokens"] != [98, 97]:  # noqa: ASYNC110 - answered over HTTP
            await asyncio.sleep(0.01)
    answer = (await served.post("/v1/completions", {"prompt": "ab", "max_tokens": 3, "return_token_ids": True})).json
    assert (answer["model"], answer["choices"][0]["prompt_token_ids"]) == ("other", [98, 97])
    assert (await served.post("/v1/completions", {"prompt": "ab", "model": "scripted"})).status == 404


def _name(served: Served) -> str:
    description = served.engine.description
    return "" if description is None else description.verifier.model_id


def _swapped(spec: TokenizerSpec) -> TokenizerSpec:
    """With the ids of a and b changed over."""
    content = json.loads(spec.tokenizer_json)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return dataclasses.replace(spec, tokenizer_json=json.dumps(content).encode(), fingerprint=fingerprint(content))
