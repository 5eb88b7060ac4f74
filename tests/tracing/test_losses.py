"""Traces of requests that meet late drafters, lost verifiers, errors, faults and a collector that hangs."""

import asyncio
from typing import Any

import pytest

from specwire.errors import InternalError
from specwire.messages import FinishReason, VerifyOpen
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript
from tests.tracing.collector import Collector
from tests.tracing.requests import PROMPT, named, of, submit

pytestmark = pytest.mark.usefixtures("patient")


async def test_a_late_drafter_shows(collector: Collector) -> None:
    script = DrafterScript()
    async with Cluster(drafters=[script], min_draft_wait_ms=30, trace_endpoint=collector.address) as cluster:
        await cluster.all_there()
        cluster.drafters[0].script.delay_s = 0.2
        await submit(cluster, PROMPT, request_id="it", seed=1, max_tokens=12).check()
        cluster.drafters[0].script.delay_s = 0.0
    proposals = named(of(collector.spans, "it"), "propose")
    assert ("fallback", {"specwire.cause": "drafter_timeout"}) in [event for propose in proposals for event in propose.events]


async def test_preempted_sequences_wait_and_prefill_again(collector: Collector) -> None:
    async with Cluster([VerifierScript(num_usable_blocks=12)], trace_endpoint=collector.address) as cluster:
        await cluster.ready()
        running = [submit(cluster, PROMPT, request_id=f"r{seed}", seed=seed, max_tokens=30) for seed in (1, 2)]
        for request in running:
            await request.check()
        num_preemptions = cluster.engine.counters.num_preemptions
    assert num_preemptions > 0
    traces = [of(collector.spans, name) for name in ("r1", "r2")]
    assert sum(spans[0].attributes["specwire.num_preemptions"] for spans in traces) == num_preemptions
    for spans in traces:
        num_places = 1 + spans[0].attributes["specwire.num_preemptions"]
        assert [len(named(spans, name)) for name in ("queue", "prefill")] == [num_places, num_places]
        assert spans[0].is_ok


async def test_a_sequence_that_moves_to_another_lane_has_a_second_place(collector: Collector) -> None:
    async with Cluster([VerifierScript(), VerifierScript(instance_id="verifier-2")], trace_endpoint=collector.address) as cluster:
        await cluster.all_there()
        running = submit(cluster, PROMPT, request_id="it", seed=1, max_tokens=60)
        await cluster.until(lambda: len(running.sink.choices[0].token_ids) > 5)
        source, target = sorted(cluster.engine.lanes, key=lambda lane: -len(lane.running))
        [sequence] = source.running
        source.leaving[sequence] = target
        await running.check()
        assert cluster.engine.counters.num_moves == 1
    spans = of(collector.spans, "it")
    assert spans[0].is_ok
    assert [prefill.attributes["specwire.lane"] for prefill in named(spans, "prefill")] == [source.index, target.index]
    assert len(named(spans, "queue")) == 2
    assert {span.message for span in spans if not span.is_ok} <= {"ABORTED: the sequence lost its place, and waits for another one"}


async def test_a_lost_verifier_shows(collector: Collector) -> None:
    async with Cluster([VerifierScript(delay_s=0.01)], trace_endpoint=collector.address) as cluster:
        await cluster.ready()
        running = submit(cluster, PROMPT, request_id="it", seed=1, max_tokens=30)
        await cluster.until(lambda: len(running.sink.choices[0].token_ids) > 5)
        await cluster.kill_verifier(0)
        await cluster.until(lambda: not cluster.engine.lanes[0].is_ready)
        await cluster.restart_verifier(0, delay_s=0.0)
        await running.check()
    spans = of(collector.spans, "it")
    assert spans[0].is_ok
    assert [len(named(spans, name)) for name in ("queue", "prefill")] == [2, 2]
    lost = [span for span in spans if not span.is_ok]
    assert {span.name for span in lost} == {"step", "verify"}
    assert all("UNAVAILABLE: v0:1 was killed" in span.message for span in lost)
    assert all(step.attributes["specwire.discarded"] for step in lost if step.name == "step")


async def test_errors_show(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    def goes_bad(open_: VerifyOpen, index: int) -> bool:
        return open_.noise_key == 13 and index == 12

    async with Cluster([VerifierScript(is_bad=goes_bad)], trace_endpoint=collector.address) as cluster:
        await cluster.ready()
        running = [submit(cluster, PROMPT, request_id=f"r{seed}", seed=seed, max_tokens=20) for seed in (12, 13)]
        assert (await running[1].sink.wait()).choices[0].finish_reason is FinishReason.ERROR
        await running[0].check()
    assert of(collector.spans, "r12")[0].is_ok
    spans = of(collector.spans, "r13")
    assert spans[0].message.startswith("INTERNAL: the verifier could not go on")
    assert any(span.attributes["specwire.row_status"] == "BAD" and not span.is_ok for span in named(spans, "verify"))
    assert f"'r13', trace {spans[0].trace_id}" in caplog.text


async def test_a_coordinator_that_stops_closes_what_is_open(collector: Collector) -> None:
    async with Cluster([VerifierScript(delay_s=0.05, max_num_seqs=1)], trace_endpoint=collector.address) as cluster:
        await cluster.ready()
        running = [submit(cluster, PROMPT, request_id=f"r{seed}", seed=seed, max_tokens=300) for seed in (1, 2)]
        await cluster.until(lambda: len(running[0].sink.choices[0].token_ids) > 1)
    for name in ("r1", "r2"):
        spans = of(collector.spans, name)
        assert spans[0].message.startswith("UNAVAILABLE: the coordinator is shutting down")
    assert [span.message[:11] for span in named(of(collector.spans, "r2"), "queue")] == ["UNAVAILABLE"]


async def test_a_fault_of_the_step_leaves_no_span_open(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane starts over; whatever the broken step had is closed with the error."""
    async with Cluster(trace_endpoint=collector.address) as cluster:
        await cluster.ready()
        running = submit(cluster, PROMPT, request_id="it", seed=1, max_tokens=20)
        await cluster.until(lambda: len(running.sink.choices[0].token_ids) > 3)
        faults = iter([InternalError("a fault")])

        def fails_once(*_: object) -> None:
            for fault in faults:
                raise fault

        monkeypatch.setattr(cluster.engine.lanes[0], "take_answers", _before(cluster.engine.lanes[0].take_answers, fails_once))
        await running.check()
    spans = of(collector.spans, "it")
    assert spans[0].is_ok
    assert any("INTERNAL: a fault" in span.message for span in named(spans, "step"))


async def test_a_round_that_could_not_be_sent_has_no_span(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(drafters=[DrafterScript()], min_draft_wait_ms=10_000, trace_endpoint=collector.address) as cluster:
        await cluster.all_there()
        running = submit(cluster, PROMPT, request_id="it", seed=1, max_tokens=40)
        await cluster.until(lambda: len(running.sink.choices[0].token_ids) > 3)
        lane = cluster.engine.lanes[0]
        with monkeypatch.context() as patch:
            patch.setattr("coordinator.lane.VerifyRound", _raises)
            await cluster.until(lambda: not lane.is_ready)
        await running.check()
    broken = [step for step in named(of(collector.spans, "it"), "step") if "it can't be made" in step.message]
    assert broken
    assert not [span for span in collector.spans if span.name == "verify" and span.parent_id == broken[0].span_id]
    assert all(0 <= span.end_ns - span.start_ns < 60_000_000_000 for span in collector.spans)


def _raises(*_: object, **__: object) -> None:
    raise InternalError("it can't be made")


def _before(function: Any, hook: Any) -> Any:
    def called(*arguments: Any) -> Any:
        hook()
        return function(*arguments)

    return called


async def test_a_hung_collector_changes_nothing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end, and so does the coordinator."""
    monkeypatch.undo()  # not patient
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    collector.released.clear()
    async with asyncio.timeout(60):
        async with Cluster(drafters=[DrafterScript()], min_draft_wait_ms=10_000, trace_endpoint=collector.address) as cluster:
            await cluster.all_there()
            for seed in range(5):
                await submit(cluster, PROMPT, seed=seed, max_tokens=30).check()
            await asyncio.to_thread(collector.called.wait, 20)
            await submit(cluster, PROMPT, seed=9, max_tokens=30).check()
    assert collector.spans == []
