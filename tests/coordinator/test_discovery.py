"""Names that stand for replicas: looked up again and again, so that peers come and go while requests run."""

import asyncio
import socket
from collections.abc import Sequence

import pytest

from coordinator.counters import Counters
from coordinator.discovery import Discovery, is_name, resolve_host
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.local import LocalNetwork
from tests.scripted.verifier import VerifierScript
from tests.waiting import until

PROMPT = [5, 6, 7, 8, 9]
FAST = {"discovery_interval_s": 0.05, "min_draft_wait_ms": 1000}


class Names:
    """A resolver with answers by host: addresses, an error, or a future."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        answer = self.answers[host]
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, list)
        return answer


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.3:50052", False), ("127.0.0.1:1", False), ("[::1]:50052", False), ("::1:50052", False), ("unix:/run/v.sock", False),
        ("unix:v:1", False), ("localhost:50052", True), ("verifier:50052", True), ("tasks.verifier.example:1", True), ("10.0.0:1", True),
    ],
)  # fmt: skip
def test_what_is_a_name(address: str, expected: bool) -> None:
    assert is_name(address) is expected


async def test_addresses_of_names() -> None:
    names = Names(verifier=["10.0.0.9", "10.0.0.3", "10.0.0.9"], six=["fd00::2"])
    discovery = Discovery(("unix:v", "verifier:7", "10.0.0.9:7", "six:8"), names, Counters())
    assert discovery.addresses == ["unix:v", "10.0.0.9:7"]
    await discovery.look_up(1.0)
    assert discovery.addresses == ["unix:v", "10.0.0.3:7", "10.0.0.9:7", "[fd00::2]:8"]
    assert discovery.server_names == {"unix:v": "", "10.0.0.3:7": "verifier", "10.0.0.9:7": "verifier", "[fd00::2]:8": "six"}
    names.answers["verifier"] = ["10.0.0.4"]
    await discovery.look_up(1.0)
    assert discovery.addresses == ["unix:v", "10.0.0.4:7", "10.0.0.9:7", "[fd00::2]:8"]
    assert discovery.problem == ""


async def test_a_failing_look_up_keeps_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    names, counters = Names(verifier=["10.0.0.3"], other=[]), Counters()
    discovery = Discovery(("verifier:7", "other:7"), names, counters)
    await discovery.look_up(1.0)
    assert discovery.problem == "other:7 has no address"
    names.answers = {"verifier": OSError("the name server is away"), "other": ["10.0.0.4"]}
    await discovery.look_up(1.0)
    assert discovery.addresses == ["10.0.0.3:7", "10.0.0.4:7"]
    assert discovery.problem == "verifier:7 can't be looked up: the name server is away"
    assert "the name server is away; goes on with 10.0.0.3:7" in caplog.text
    assert counters.num_lookup_failures == 1
    names.answers["verifier"] = []
    await discovery.look_up(1.0)
    assert discovery.addresses == ["10.0.0.4:7"]


async def test_a_look_up_that_hangs_holds_nobody_up() -> None:
    hung: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    names, counters = Names(verifier=hung, other=["10.0.0.4"]), Counters()
    discovery = Discovery(("verifier:7", "other:7"), names, counters)
    for num_failures in (1, 2):
        await discovery.look_up(0.01)
        assert (discovery.addresses, counters.num_lookup_failures) == (["10.0.0.4:7"], num_failures)
        assert "no answer within 0.01 s" in discovery.problem
    hung.set_result(["10.0.0.3"])
    await discovery.look_up(1.0)
    assert discovery.addresses == ["10.0.0.3:7", "10.0.0.4:7"]
    names.answers["verifier"] = asyncio.get_running_loop().create_future()
    await discovery.look_up(0.01)
    discovery.close()


async def test_localhost_is_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(await resolve_host("localhost", 50052)) == 1
    both = [(socket.AF_INET6, 1, 6, "", ("::1", 7, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 7))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert await resolve_host("localhost", 7) == ["127.0.0.1"]


@pytest.mark.parametrize(("number", "is_answer"), [(socket.EAI_NONAME, True), (socket.EAI_NODATA, True), (socket.EAI_AGAIN, False)])
async def test_no_such_host_is_an_answer(number: int, is_answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "as the test wants it")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    if is_answer:
        assert await resolve_host("verifier", 7) == []
    else:
        with pytest.raises(OSError, match="as the test wants it"):
            await resolve_host("verifier", 7)


async def test_names_that_can_never_exist_are_failures() -> None:
    with pytest.raises((OSError, UnicodeError)):
        await resolve_host("x" * 70 + ".example", 7)


async def test_peers_that_appear_later() -> None:
    async with Cluster([VerifierScript()], [DrafterScript()], discovered=True, **FAST) as cluster:
        await cluster.all_there()
        cluster.list_verifiers()
        cluster.list_drafters()
        await cluster.kill_verifier(0)
        await cluster.kill_drafter(0)
        await cluster.until(lambda: not cluster.engine.lanes)
        assert cluster.engine.ready == (False, "no verifier is known: verifier:1 has no address")
        verifier, drafter = await cluster.add_verifier(), await cluster.add_drafter()
        cluster.list_verifiers(verifier)
        await cluster.ready()
        await cluster.submit(PROMPT, seed=1, max_tokens=40).check()
        cluster.list_drafters(drafter)
        seed = 2
        while not cluster.drafters[drafter].num_rows:
            await cluster.submit(PROMPT, seed=seed, max_tokens=400).check()
            seed += 1
        assert [lane.index for lane in cluster.engine.lanes] == [1]
        assert cluster.engine.counters.num_accepted_tokens > 0


async def test_nothing_is_found_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(verifier=[], drafter=OSError("no name server"))
    monkeypatch.setattr(LocalNetwork, "resolve", lambda self, host, port: names(host, port))
    async with Cluster([VerifierScript()], [DrafterScript()], discovered=True, **FAST) as cluster:
        assert cluster.engine.ready == (False, "no verifier is known: verifier:1 has no address")
        assert cluster.engine.counters.num_lookup_failures > 0
        names.answers = {"verifier": ["v0"], "drafter": ["d0"]}
        await cluster.ready()
        await cluster.submit(PROMPT, seed=1, max_tokens=50).check()


async def test_a_connected_peer_outlives_a_wrong_name_server() -> None:
    async with Cluster([VerifierScript(delay_s=0.002)], [DrafterScript()], discovered=True, **FAST) as cluster:
        await cluster.all_there()
        running = cluster.submit(PROMPT, seed=1, max_tokens=400)
        [lane] = cluster.engine.lanes
        cluster.list_verifiers()
        cluster.list_drafters()
        await running.check()
        assert cluster.engine.lanes == [lane]
        assert lane.is_ready
        assert [link.is_connected for link in lane.links] == [True]
        assert cluster.engine.counters.num_verifier_losses == cluster.engine.counters.num_drafter_losses == 0


async def test_two_addresses_of_one_process_are_one_lane() -> None:
    async with Cluster([VerifierScript(instance_id="one")] * 2, [DrafterScript(instance_id="one")] * 2, discovered=True, **FAST) as cluster:
        await until(lambda: cluster.engine.counters.num_verifier_refusals > 0 and cluster.engine.counters.num_drafter_refusals > 0)
        assert sorted(lane.is_ready for lane in cluster.engine.lanes) == [False, True]
        assert "it is the same process as lane" in cluster.engine.ready.reason
        await until(lambda: any(link.is_usable for lane in cluster.engine.lanes if lane.is_ready for link in lane.links))
        assert max(sum(link.is_usable for link in lane.links) for lane in cluster.engine.lanes) == 1
        [first] = [lane for lane in cluster.engine.lanes if lane.is_ready]
        # When the address in use is lost, the other one takes its place.
        await cluster.kill_verifier(first.index)
        await cluster.until(lambda: any(lane.is_ready and lane is not first for lane in cluster.engine.lanes))
        await cluster.submit(PROMPT, seed=1, max_tokens=50).check()


async def test_found_peers_that_do_not_match_keep_nobody_from_starting() -> None:
    scripts = [VerifierScript(), VerifierScript(weights_hash="others")], [DrafterScript(), DrafterScript(vocab_size=999)]
    async with Cluster(*scripts, discovered=True, **FAST) as cluster:
        counters = cluster.engine.counters
        await until(lambda: counters.num_verifier_refusals > 0 and counters.num_drafter_refusals > 0)
        assert [lane.is_ready for lane in cluster.engine.lanes] == [True, False]
        assert "weights_hash is 'others'" in cluster.engine.ready.reason
        await cluster.submit(PROMPT, seed=1, max_tokens=50).check()
        assert (cluster.drafters[0].num_rows > 0, cluster.drafters[1].num_rows) == (True, 0)


async def test_a_lane_that_is_forgotten_gives_up_what_it_waits_for() -> None:
    """Its links' timers too: nothing stirs for a lane that is gone."""
    async with Cluster([VerifierScript()], [DrafterScript()], discovered=True, discovery_interval_s=0.05, min_draft_wait_ms=20.0) as cluster:
        await cluster.all_there()
        [link] = cluster.engine.lanes[0].links
        cluster.drafters[0].script.delay_s = 3600.0
        cluster.submit(PROMPT, seed=1, max_tokens=40)
        await cluster.until(lambda: link.is_late)
        await cluster.kill_verifier(0)
        cluster.list_verifiers()
        await cluster.until(lambda: not cluster.engine.lanes)
        await until(lambda: link.asked._timer is None)
