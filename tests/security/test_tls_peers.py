"""TLS between the coordinator and its verifiers and drafters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.engine import Engine
from coordinator.rpc import Connectors, GrpcVerifier
from specwire.config import CoordinatorConfig
from specwire.errors import UnavailableError
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.tls import ServerTls, TlsOptions
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript, ScriptedDrafter
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier, VerifierScript
from tests.security.certificates import Authority, copy
from tests.security.conftest import Files, make_files
from tests.waiting import until

PROMPT = [5, 6, 7]


@contextlib.asynccontextmanager
async def stack(
    verifier_tls: ServerTls | None, drafter_tls: ServerTls | None, **config: str
) -> AsyncIterator[tuple[Engine, ScriptedVerifier, ScriptedService]]:
    """A verifier and a drafter on TCP ports, and an engine that is started but need not be ready."""
    verifier, drafter = ScriptedVerifier(VerifierScript(delay_s=0.001)), ScriptedDrafter(DrafterScript(acceptance=0.8))
    services = [ScriptedService(verifier, tls=verifier_tls), ScriptedService(drafter, tls=drafter_tls)]
    addresses = [await service.start() for service in services]
    settings = CoordinatorConfig(
        verifiers=(addresses[0],), drafters=(addresses[1],), speculative_config=SpeculativeConfig(num_speculative_tokens=3), **config
    )  # fmt: skip
    connectors = Connectors(settings)
    engine = Engine(settings, connectors.verifier, connectors.drafter)
    await engine.start()
    try:
        yield engine, verifier, services[0]
    finally:
        await engine.stop(0)
        for service in services:
            await service.kill()


async def generate(engine: Engine, verifier: ScriptedVerifier, num_tokens: int = 40) -> CollectingSink:
    sink = CollectingSink()
    engine.submit(GenerateRequest(PROMPT, SamplingParams(max_tokens=num_tokens, seed=1)), sink)
    async with asyncio.timeout(30):
        await sink.wait()
    assert sink.choices[0].token_ids == verifier.target.generate(PROMPT, num_tokens, 1)
    return sink


async def ready(engine: Engine) -> None:
    await until(lambda: engine.ready.is_ready and all(link.is_connected for lane in engine.lanes for link in lane.links), 30)


async def refused(engine: Engine, text: str) -> None:
    """Waits until the engine says that it can't serve for this reason."""
    async with asyncio.timeout(30):
        while engine.ready.is_ready or text not in engine.ready.reason:
            await engine.readiness_changed()
    assert not engine.ready.is_ready


def server(files: Files, *, mutual: bool) -> ServerTls:
    return ServerTls(files.server.cert, files.server.key, files.ca.file if mutual else "")


@pytest.mark.parametrize("mutual", [False, True])
async def test_verifier_and_drafter_with_tls(files: Files, mutual: bool) -> None:
    own = {"tls_cert": files.client.cert, "tls_key": files.client.key} if mutual else {}
    async with stack(server(files, mutual=mutual), server(files, mutual=mutual), tls_ca=files.ca.file, **own) as (engine, verifier, _):
        await ready(engine)
        sink = await generate(engine, verifier)
        assert sink.choices[0].spec_stats is not None
        assert sink.choices[0].spec_stats.num_accepted_tokens > 0, "the drafter was used"


async def test_a_wrong_authority_is_named(files: Files) -> None:
    async with stack(server(files, mutual=False), None, tls_ca=files.other_ca.file) as (engine, _, _):
        await refused(engine, "TLS could not be agreed on")


async def test_a_verifier_without_tls_is_not_called_with_it(files: Files) -> None:
    async with stack(None, None, tls_ca=files.ca.file) as (engine, _, _):
        await refused(engine, "TLS could not be agreed on")


async def test_a_coordinator_without_a_certificate_stays_out(files: Files) -> None:
    async with stack(server(files, mutual=True), None, tls_ca=files.ca.file) as (engine, verifier, _):
        await refused(engine, "verifier")
        assert verifier.session is None


async def test_a_drafter_that_cannot_be_trusted_is_done_without(files: Files) -> None:
    foreign = ServerTls(files.foreign.cert, files.foreign.key)
    async with stack(server(files, mutual=False), foreign, tls_ca=files.ca.file) as (engine, verifier, _):
        async with asyncio.timeout(30):
            while not engine.ready.is_ready:
                await engine.readiness_changed()
        sink = await generate(engine, verifier)
        assert sink.choices[0].spec_stats is not None
        assert sink.choices[0].spec_stats.num_draft_tokens == 0


async def test_a_replica_that_was_found_by_name_shows_that_name(files: Files) -> None:
    service = ScriptedService(ScriptedVerifier(), tls=ServerTls(files.other_host.cert, files.other_host.key))
    address = await service.start()
    for name, fits in (("elsewhere.example", True), ("nowhere.example", False), ("", False)):
        peer = GrpcVerifier(address, 1 << 20, name, TlsOptions(files.ca.file))
        if fits:
            assert (await peer.describe()).model_id == "scripted"
        else:
            with pytest.raises(UnavailableError, match="TLS could not be agreed on"):
                await peer.describe()
        await peer.close()
    await service.kill()


async def test_changed_files_that_cannot_be_used_are_counted_and_the_ones_before_stay(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    service = ScriptedService(ScriptedVerifier(), tls=server(files, mutual=False))
    connectors = Connectors(CoordinatorConfig(verifiers=("unused:1",), tls_ca=files.ca.file))
    peer = connectors.verifier(await service.start(), 1 << 20, "")
    assert (await peer.describe()).model_id == "scripted"
    assert connectors.num_failed_reloads == 0
    copy(files.server.key, files.ca.file)  # no certificate
    assert (await peer.describe()).model_id == "scripted"
    assert (await peer.describe()).model_id == "scripted"
    assert connectors.num_failed_reloads == 1
    await peer.close()
    await service.kill()


async def test_a_renewed_authority_is_used_for_the_next_connection(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    (tmp_path / "new").mkdir()
    new_ca = Authority(tmp_path / "new", "new-ca")
    async with stack(server(files, mutual=False), None, tls_ca=files.ca.file, verifier_wait_s=60.0) as (engine, verifier, service):
        async with asyncio.timeout(30):
            while not engine.ready.is_ready:
                await engine.readiness_changed()
        sink = CollectingSink()
        engine.submit(GenerateRequest(PROMPT, SamplingParams(max_tokens=300, seed=1)), sink)
        address = service.address
        await service.kill()
        files.server.replace_with(new_ca.issue("renewed"))
        again = ScriptedService(ScriptedVerifier(verifier.script), address, tls=server(files, mutual=False))
        await again.start()
        await refused(engine, "TLS could not be agreed on")
        copy(new_ca.file, files.ca.file)
        async with asyncio.timeout(30):
            await sink.wait()
        assert sink.choices[0].token_ids == verifier.target.generate(PROMPT, 300, 1)
        await again.kill()
