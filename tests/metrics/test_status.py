"""GetStatus and `specwire status`: what they say is what happened."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coordinator.engine import Engine
from coordinator.server import CoordinatorServicer
from coordinator.status import describe_status
from specwire.cli import app
from specwire.cli.status import Look, look_again, print_looks, show_live
from specwire.cli.status_view import render, short_address
from specwire.client import AsyncClient, Client
from specwire.config import CoordinatorConfig
from specwire.errors import DeadlineExceededError, UnavailableError
from specwire.messages import (
    CalibrationStatus,
    CoordinatorStatus,
    DraftCost,
    DrafterStatus,
    LaneStatus,
    PolicyStatus,
    SettingStatus,
    StepStatus,
    VerifyCost,
)
from specwire.rpc import Server
from specwire.wire.status import pack_status, unpack_status
from tests.metrics.served import serve_cluster, serve_in_thread
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

COSTS = VerifyCost((1, 8), (4.0, 11.0), 0.25, 0.5, 8, 6, (8, 16), (20.0, 40.0))
POLICY = PolicyStatus(True, "a drafter has no cost table", 30, 4, 60, 28, (0.75, 0.5, 0.25), 0.0625, 1.25, 0.5, 1.125, 1.375)
FULL = CoordinatorStatus(
    version="0.1.0", uptime_s=100.0, is_ready=True, reason="lane 1: gone", model_id="tiny", max_model_len=512, max_num_seqs=16,
    max_num_batched_tokens=128, num_speculative_tokens=3, max_queue=10, num_waiting=2, num_requests=9, num_requests_ended=5, num_prompt_tokens=70,
    num_generated_tokens=100, num_preemptions=1, num_pauses=4, num_parked=3, num_drafts=10, num_draft_tokens=28, num_accepted_tokens=14,
    clipped=("max_num_seqs clipped",),
    drafts_per_position=(10, 10, 8), accepted_per_position=(8, 4, 2), sequences_by_reason={"stop": 3, "length": 2},
    fallbacks_by_cause={"no_drafter": 4},
    lanes=(
        LaneStatus(0, "v:1", True, "", False, 7, 3, 30, 40, 12, StepStatus(9.5, 1.0, 2.0, 0.5, 0.25, 5.0, 0.75), COSTS, POLICY),
        LaneStatus(1, "v:2", reason="gone"),
    ),
    drafters=(
        DrafterStatus("d:1", "ngram", "ngram-2-4", True, False, False, 5, 64, 1.5, 20, 1, 60, (DraftCost(1, 4, 0.5),), 0.25),
        DrafterStatus("d:2"),
    ),
    speculation=(
        SettingStatus("num_speculative_tokens", "3", "5", "specwire.yaml:4", ("num_speculative_tokens clipped from 5 to 3",)),
        SettingStatus("prompt_lookup_max", "5", "5", "default"),
    ),
    calibration=(CalibrationStatus("ngram ngram-2-4", True, 0.015625, (0.015625, 0.03125), (0.75, 0.5), (120, 90)),),
)  # fmt: skip
LATER = dataclasses.replace(FULL, uptime_s=102.0, num_generated_tokens=150, num_requests_ended=7, drafts_per_position=(12, 12, 10))


def text_of(*looks: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - the console's own
    for look in looks:
        console.print(look)
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize("status", [FULL, CoordinatorStatus("unknown", 0.0, False)], ids=["full", "empty"])
def test_a_status_survives_the_wire(status: CoordinatorStatus) -> None:
    assert unpack_status(pack_status(status)) == status


async def test_a_fresh_coordinator_has_zeros_everywhere(socket_dir: Path) -> None:
    async with serve_cluster(socket_dir, k=4, max_queue=7) as served, AsyncClient(served.address) as client:
        status = await client.get_status()
    assert status.is_ready
    assert (status.model_id, status.num_speculative_tokens, status.max_queue, status.max_num_seqs) == ("scripted", 4, 7, 16)
    numbers = {field.name: getattr(status, field.name) for field in dataclasses.fields(status) if field.name.startswith("num_")}
    assert {name for name, number in numbers.items() if number} == {"num_speculative_tokens"}
    assert status.drafts_per_position == status.accepted_per_position == (0, 0, 0, 0)
    assert status.sequences_by_reason == status.fallbacks_by_cause == {}
    [lane], [drafter] = status.lanes, status.drafters
    assert lane == LaneStatus(0, lane.address, True, num_free_blocks=2048, num_blocks=2048)
    assert drafter == DrafterStatus(drafter.address, "scripted", "scripted-draft", True, max_num_seqs=64)
    assert text_of(render(status, None))


async def test_counts_are_those_of_the_requests(socket_dir: Path) -> None:
    async with serve_cluster(socket_dir) as served, AsyncClient(served.address) as client:
        results = [await client.generate([3 + i, 4, 5], max_tokens=9, temperature=0.0) for i in range(4)]
        status = await client.get_status()
    specs = [result.choices[0].spec for result in results]
    assert (status.num_requests, status.num_requests_ended, status.num_prompt_tokens, status.num_generated_tokens) == (4, 4, 12, 36)
    assert status.sequences_by_reason == {"length": 4}
    assert status.num_draft_tokens == sum(spec.num_draft_tokens for spec in specs) > 0
    assert status.num_accepted_tokens == sum(spec.num_accepted_tokens for spec in specs) == status.num_draft_tokens
    assert status.num_drafts == sum(spec.num_drafts for spec in specs) == status.drafts_per_position[0]
    assert status.accepted_per_position == tuple(sum(column) for column in zip(*(spec.accepted_per_position for spec in specs), strict=True))
    [lane], [drafter] = status.lanes, status.drafters
    verifier, scripted = served.cluster.verifiers[0], served.cluster.drafters[0]
    assert lane.num_steps == verifier.num_rounds
    assert lane.num_speculative_tokens == 3
    assert drafter.num_replies > 0
    assert drafter.num_replies <= scripted.num_rounds
    times = lane.times
    assert times.step_ms > 0
    assert 0 < times.plan_ms <= times.step_ms
    assert times.forward_ms == 0.0, "scripted verifiers give no times"
    assert drafter.reply_ms > 0


async def test_peers_that_are_away_are_shown_with_the_reason() -> None:
    async with Cluster([VerifierScript()] * 2, [DrafterScript()], absent=["v1", "d0"]) as cluster:
        await cluster.ready()
        status = describe_status(cluster.engine)
    assert status.is_ready
    assert [(lane.index, lane.is_ready, lane.reason) for lane in status.lanes] == [(0, True, ""), (1, False, "not connected yet")]
    assert status.reason == "lane 1: not connected yet; drafter d0:1: not connected yet"
    assert status.lanes[1] == LaneStatus(1, "v1:1", reason="not connected yet")
    assert status.drafters == (DrafterStatus("d0:1"),)
    assert unpack_status(pack_status(status)) == status


async def test_before_the_start_there_is_a_status_too() -> None:
    status = describe_status(Engine(CoordinatorConfig(verifiers=("127.0.0.1:1",))))
    assert (status.is_ready, status.lanes, status.drafters, status.model_id) == (False, (), (), "")


async def test_another_service_is_no_coordinator(socket_dir: Path) -> None:
    server = Server([f"unix:{socket_dir}/other"], [], lambda _: None)
    await server.start()
    async with AsyncClient(f"unix:{socket_dir}/other") as client:
        with pytest.raises(UnavailableError, match="no coordinator"):
            await client.get_status()
    await server.stop(0)


async def test_a_coordinator_that_hangs_is_not_waited_for(socket_dir: Path) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    with mock.patch.object(CoordinatorServicer, "GetStatus", hang):
        async with serve_cluster(socket_dir) as served, AsyncClient(served.address) as client:
            with pytest.raises(DeadlineExceededError, match=r"did not answer within 0\.05 s"):
                await client.get_status(timeout=0.05)


def test_the_blocking_client_asks_too(socket_dir: Path) -> None:
    with serve_in_thread(socket_dir) as address, Client(address) as client:
        assert client.get_status().is_ready


def test_once_prints_tables(socket_dir: Path) -> None:
    with serve_in_thread(socket_dir) as address:
        result = CliRunner().invoke(app, ["status", "--address", address])
    assert result.exit_code == 0, result.stderr
    for word in ("serving", "scripted", "v0:1", "d0:1", "forward", "accepted at position"):
        assert word in result.stdout


def test_json_is_the_whole_status(socket_dir: Path) -> None:
    with serve_in_thread(socket_dir) as address:
        result = CliRunner().invoke(app, ["status", "--json", "--address", address])
    assert result.exit_code == 0, result.stderr
    status = json.loads(result.stdout)
    assert status.keys() == {field.name for field in dataclasses.fields(CoordinatorStatus)}
    assert status["lanes"][0]["times"].keys() == {field.name for field in dataclasses.fields(StepStatus)}


def test_an_absent_coordinator_is_an_error_with_a_remedy(socket_dir: Path) -> None:
    result = CliRunner().invoke(app, ["status", "--once", "--address", f"unix:{socket_dir}/nobody"])
    assert result.exit_code == 1
    assert "nobody can't be reached" in result.stderr
    assert "specwire up" in result.stderr


def test_watching_goes_on_while_the_coordinator_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Look] = [FULL, UnavailableError("the coordinator at c:1 can't be reached"), LATER]
    waits: list[None] = []

    def ask() -> CoordinatorStatus:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait() -> None:
        waits.append(None)
        if not answers:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        print_looks(Console(width=160), look_again(ask, wait), as_json=True)
    out, err = capsys.readouterr()
    assert [json.loads(line)["uptime_s"] for line in out.splitlines()] == [100.0, 102.0]
    assert err == "specwire: the coordinator at c:1 can't be reached; trying again\n"
    assert len(waits) == 3


def test_the_live_table_keeps_what_was_seen_last() -> None:
    console = Console(width=160, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115 - the console's own
    looks: Iterator[Look] = iter([FULL, UnavailableError("the coordinator at c:1 can't be reached")])
    show_live(console, looks)
    console.file.close()
    last = console.export_text().rpartition("trying again")[2]
    assert "tiny" in last
    assert "ngram-2-4" in last


def test_what_the_tables_show() -> None:
    text = text_of(render(FULL, None))
    for part in (
        "7 running, 2 of at most 10 waiting, 3 parked until their clients read",
        "9 in, 5 ended (–)", "70 prompt, 100 generated (–)", "length 2, stop 3", "7/16", "3/3", "10/40 (25%)",
        "9.5", "not ready", "not connected", "5/64", "80%", "40%", "25%", "50%", "no_drafter 4", "lane 1: gone",
    ):  # fmt: skip
        assert part in text, f"{part!r} is not in\n{text}"


def test_what_it_shows_of_speculation() -> None:
    text = text_of(render(FULL, None))
    for what in (
        "speculation: num_speculative_tokens 3", "num_speculative_tokens clipped from 5 to 3", "fixed: a drafter has no cost table", "28/60", "6%",
        "1.25", "0.75 0.50 0.25", "210", "1.6%",
    ):  # fmt: skip
        assert what in text
    assert "prompt_lookup_max" not in text, "nobody wrote it, and it is as it is by default"


def test_rates_are_differences_over_the_coordinators_clock() -> None:
    text = text_of(render(LATER, FULL))
    assert "100 generated" not in text
    assert "150 generated (25.0/s)" in text
    assert "7 ended (1.0/s)" in text
    assert "since the last look" in text


def test_a_restarted_coordinator_has_no_rates() -> None:
    text = text_of(render(FULL, LATER))
    assert "100 generated (–)" in text
    assert "since the last look" not in text


def test_sockets_are_named_by_their_file() -> None:
    assert short_address("unix:/tmp/specwire-abc/verifier-0") == "unix:…/verifier-0"
    assert short_address("unix:/run/v") == "unix:/run/v"
    assert short_address("10.0.0.1:50052") == "10.0.0.1:50052"
