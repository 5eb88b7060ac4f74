"""Addresses where something else answers, or nothing: what the coordinator says of them."""

import asyncio
import dataclasses
import logging

import pytest

from coordinator.rpc import GrpcDrafter, GrpcVerifier
from coordinator.server import CoordinatorServer
from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript, ScriptedDrafter
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier
from tests.waiting import until

PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("service", "connect", "kind"), [(ScriptedDrafter, GrpcVerifier, "verifier"), (ScriptedVerifier, GrpcDrafter, "drafter")]
)  # fmt: skip
async def test_another_service_at_the_address(service: type[ScriptedDrafter], connect: type[GrpcVerifier], kind: str) -> None:
    other = ScriptedService(service())
    address = await other.start()
    peer = connect(address, 1 << 20)
    with pytest.raises(FailedPreconditionError, match=f"there is no {kind} at {address}, but another service; check the address"):
        await peer.describe()
    await peer.close()
    await other.kill()


@pytest.mark.parametrize("kind", ["v", "d"])
async def test_what_describes_itself_is_what_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer may send one call to a replica and the next to another, which has not been looked at: its weights may be others."""
    async with Cluster([byte_verifier_script()], [byte_drafter_script()], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        peer = cluster.verifiers[0] if kind == "v" else cluster.drafters[0]
        described = dataclasses.replace(peer.describe(), instance_id="another")
        monkeypatch.setattr(peer, "describe", lambda: described)
        cluster.network.cut(f"{kind}0:1")
        text = f"process {peer.instance_id} has answered, but another was described"
        await until(lambda: text in cluster.engine.ready.reason)
        assert cluster.engine.ready.is_ready == (kind == "d")
        monkeypatch.undo()
        await (await cluster.all_there()).submit(PROMPT, seed=1, max_tokens=20).check()


async def test_a_tokenizer_is_that_of_the_verifier_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster([byte_verifier_script()], absent=["v0"]) as cluster:
        wrong = dataclasses.replace(make_spec(), fingerprint="another")
        monkeypatch.setattr(ScriptedVerifier, "tokenizer", lambda self: wrong)
        await cluster.restart_verifier(0)
        text = f"its tokenizer has fingerprint another, but its description {make_spec().fingerprint}"
        await until(lambda: text in cluster.engine.ready.reason)
        monkeypatch.undo()
        await cluster.ready()
        assert cluster.engine.tokenizer == make_spec()


async def test_the_log_names_drafters_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with Cluster(drafters=[DrafterScript()] * 2, absent=["d0", "d1"]) as cluster:
        server = CoordinatorServer(cluster.engine, CoordinatorConfig(listen=("127.0.0.1:0",)))
        await server.start()
        following = asyncio.create_task(server.follow_readiness())
        await until(lambda: "serving: drafter d0:1: not connected yet; drafter d1:1: not connected yet" in caplog.text)
        assert cluster.engine.ready.is_ready, "drafters are not needed"
        await cluster.submit(PROMPT, seed=1, max_tokens=10).check()
        await cluster.restart_drafter(0)
        await until(lambda: "serving: drafter d1:1: not connected yet" in caplog.text)
        assert "all peers are there" not in caplog.text
        await cluster.restart_drafter(1, max_message_bytes=1)
        await until(lambda: "max_message_mb" in cluster.engine.ready.reason)
        await until(lambda: f"serving: {cluster.engine.ready.reason}" in caplog.text)
        await cluster.restart_drafter(1, max_message_bytes=64 << 20)
        await until(lambda: "serving: all peers are there" in caplog.text)
        await cluster.kill_drafter(0)
        await until(lambda: "drafter d0:1: " in cluster.engine.ready.reason)
        following.cancel()
        await server.stop(0)


async def test_the_log_of_a_start_and_of_a_loss(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has served can cease to."""
    monkeypatch.setattr("coordinator.probe._PROBE_S", 0.05)
    caplog.set_level(logging.INFO, "coordinator.server")
    async with Cluster(absent=["v0"]) as cluster:
        server = CoordinatorServer(cluster.engine, CoordinatorConfig(listen=("127.0.0.1:0",)))
        await server.start()
        following = asyncio.create_task(server.follow_readiness())
        await until(lambda: "starting: lane 0: not connected yet" in caplog.text)
        await cluster.restart_verifier(0)
        await until(lambda: "serving: all peers are there" in caplog.text)
        await cluster.kill_verifier(0)
        await until(lambda: "not serving: lane 0: verifier v0" in caplog.text)
        following.cancel()
        await server.stop(0)
    states = [record.getMessage().partition(":")[0] for record in caplog.records if record.name == "coordinator.server"]
    assert list(dict.fromkeys(states)) == ["starting", "serving", "not serving"]
