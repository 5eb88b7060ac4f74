"""Replicas that are found by name: their certificates name what they were found by, not the address that it stood for."""

import asyncio
from pathlib import Path

import pytest

from coordinator.engine import Engine
from coordinator.rpc import Connectors
from specwire.config import CoordinatorConfig
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.tls import ServerTls
from tests.scripted.collect import CollectingSink
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier
from tests.security.certificates import Authority
from tests.waiting import until

PROMPT = [5, 6, 7]


@pytest.mark.parametrize(("name", "is_right"), [("verifier.example", True), ("elsewhere.example", False)])
async def test_certificates_name_the_host_that_was_looked_up(tmp_path: Path, name: str, is_right: bool) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("replica", name)
    verifier = ScriptedVerifier()
    service = ScriptedService(verifier, tls=ServerTls(pair.cert, pair.key, ""))
    port = (await service.start()).rpartition(":")[2]
    config = CoordinatorConfig(verifiers=(f"verifier.example:{port}",), tls_ca=authority.file)

    async def resolve(host: str, _: int) -> list[str]:
        assert host == "verifier.example"
        return ["127.0.0.1"]

    connectors = Connectors(config)
    engine = Engine(config, connectors.verifier, connectors.drafter, resolve)
    await engine.start()
    try:
        if is_right:
            await until(lambda: engine.ready.is_ready, 30.0)
            sink = CollectingSink()
            engine.submit(GenerateRequest(PROMPT, SamplingParams(max_tokens=20, seed=1)), sink)
            async with asyncio.timeout(30):
                await sink.wait()
            assert sink.choices[0].token_ids == verifier.target.generate(PROMPT, 20, 1)
        else:
            await until(lambda: "TLS could not be agreed on" in engine.ready.reason, 30.0)
            assert not engine.ready.is_ready
    finally:
        await engine.stop(0)
        await service.kill()
