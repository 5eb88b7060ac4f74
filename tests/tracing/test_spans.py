"""The coordinator's spans over scripted services: what there is of a request, and what is not."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.trace_records import StepSample
from specwire.errors import InternalError
from specwire.messages import FinishReason, GenerateRequest, VerifyOpen
from specwire.sampling_params import SamplingParams
from tests.scripted.cluster import Cluster, Running
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript
from tests.tracing.collector import Collector, Seen, check_declared, check_tree, collecting

PROMPT = [5, 6, 7, 8, 9]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def submit(cluster: Cluster, prompt: list[int], *, request_id: str = "", traceparent: str = "", **sampling: Any) -> Running:
    params = SamplingParams(**sampling)
    sink = CollectingSink(params.n, on_tokens=cluster.advance)
    handle = cluster.engine.submit(GenerateRequest(prompt, params, request_id, traceparent=traceparent), sink)
    return Running(cluster, prompt, params, sink, handle)


def of(spans: list[Seen], request_id: str) -> list[Seen]:
    """The trace of the request, checked."""
    [root] = [span for span in spans if span.name == "generate" and span.attributes["specwire.request_id"] == request_id]
    trace = [span for span in spans if span.trace_id == root.trace_id]
    check_declared(trace)
    check_tree(trace)
    return [root, *(span for span in trace if span is not root)]


def named(spans: list[Seen], name: str) -> list[Seen]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


async def test_one_request(collector: Collector) -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.7)], min_draft_wait_ms=10_000, trace_endpoint=collector.address) as cluster:
        await cluster.all_there()
        running = submit(cluster, PROMPT, request_id="one", seed=1, max_tokens=20)
        await running.check()
        choice = running.sink.choices[0]
    spans = of(collector.spans, "one")
    root, steps = spans[0], named(spans, "step")
    assert choice.usage is not None
    assert choice.spec_stats is not None
    assert root.is_ok
    assert root.parent_id == ""
    assert {key.removeprefix("specwire."): value for key, value in root.attributes.items() if "time" not in key} == {
        "request_id": "one", "num_choices": 1, "num_prompt_tokens": 5, "num_generated_tokens": 20, "num_cached_tokens": 0,
        "num_steps": choice.spec_stats.num_steps, "num_draft_tokens": choice.spec_stats.num_draft_tokens,
        "num_accepted_tokens": choice.spec_stats.num_accepted_tokens, "num_preemptions": 0, "finish_reasons": ["length"],
    }  # fmt: skip
    assert 0 < root.attributes["specwire.time_to_first_token_ms"] <= (root.end_ns - root.start_ns) / 1e6
    assert Counter(span.name for span in spans) == {
        "generate": 1, "queue": 1, "prefill": 1, "step": len(steps), "verify": len(steps), "propose": len(steps) - 1
    }  # fmt: skip
    # Every step is there, the first one is the prefill, and together they have all tokens.
    assert [step.attributes["specwire.step"] for step in steps] == list(range(1, choice.spec_stats.num_steps + 1))
    assert sum(step.attributes["specwire.num_tokens"] for step in steps) >= 20
    verifies, proposals = named(spans, "verify"), named(spans, "propose")
    assert [verify.parent_id for verify in verifies] == [step.span_id for step in steps]
    assert [propose.parent_id for propose in proposals] == [step.span_id for step in steps[1:]]
    assert sum(verify.attributes["specwire.num_draft_tokens"] for verify in verifies) == choice.spec_stats.num_draft_tokens > 0
    assert sum(verify.attributes["specwire.num_accepted_tokens"] for verify in verifies) == choice.spec_stats.num_accepted_tokens > 0
    assert [propose.attributes["specwire.num_draft_tokens"] for propose in proposals] == [
        verify.attributes["specwire.num_draft_tokens"] for verify in verifies[1:]
    ]
    assert all(verify.attributes["specwire.row_status"] == "OK" for verify in verifies)
    [queue], [prefill] = named(spans, "queue"), named(spans, "prefill")
    assert root.start_ns <= queue.start_ns <= queue.end_ns == prefill.start_ns < prefill.end_ns
    assert prefill.attributes["specwire.num_tokens"] == 5


async def test_steps_link_to_the_other_requests_of_their_batch(collector: Collector) -> None:
    async with Cluster([VerifierScript(max_num_seqs=40, max_num_batched_tokens=400)], trace_endpoint=collector.address) as cluster:
        await cluster.ready()
        names = [f"r{index}" for index in range(40)]
        running = [submit(cluster, [*PROMPT, index + 10], request_id=name, seed=index, max_tokens=8) for index, name in enumerate(names)]
        for request in running:
            await request.check()
    roots = {span.span_id: span for span in named(collector.spans, "generate")}
    assert len(roots) == 40
    for name in names:
        spans = of(collector.spans, name)
        for step in named(spans, "step"):
            assert len(step.links) == min(32, step.attributes["specwire.num_rows"] - 1)
            assert len(set(step.links)) == len(step.links)
            assert all(roots[span_id].trace_id == trace_id != step.trace_id for trace_id, span_id in step.links)
        assert any(len(step.links) == 32 for step in named(spans, "step"))


async def test_choices_share_a_trace_and_its_steps(collector: Collector) -> None:
    async with Cluster(trace_endpoint=collector.address, trace_max_steps=10) as cluster:
        await cluster.ready()
        running = submit(cluster, PROMPT, request_id="three", seed=1, max_tokens=40, n=3)
        await running.check()
    spans = of(collector.spans, "three")
    assert Counter((span.name, span.attributes["specwire.choice"]) for span in spans[1:] if span.name in ("queue", "prefill")) == {
        (name, choice): 1 for name in ("queue", "prefill") for choice in range(3)
    }
    assert spans[0].attributes["specwire.num_generated_tokens"] == 120
    steps = Counter(step.attributes["specwire.choice"] for step in named(spans, "step"))
    assert sum(steps.values()) <= 10
    assert set(steps) == {0, 1, 2}
    assert all(not step.links for step in named(spans, "step"))


def test_step_sample() -> None:
    sample = StepSample(32)
    taken = [number for number in range(1, 2000) if sample.takes_next()]
    assert len(taken) == 32
    assert taken[:16] == list(range(1, 17))
    gaps = [later - earlier for earlier, later in itertools.pairwise(taken)]
    assert gaps == sorted(gaps)
    assert 200 < taken[-1] < 1000
    assert not any(StepSample(0).takes_next() for _ in range(5))
    assert StepSample(1).takes_next()


async def test_step_spans_are_capped(collector: Collector) -> None:
    async with Cluster(trace_endpoint=collector.address, trace_max_steps=8) as cluster:
        await cluster.ready()
        await submit(cluster, PROMPT * 60, request_id="long", seed=1, max_tokens=200).check()
        await submit(cluster, PROMPT, request_id="short", seed=1, max_tokens=3).check()
    steps = named(of(collector.spans, "long"), "step")
    assert len(steps) == 8
    assert steps[0].attributes["specwire.num_tokens"] == 0, "a chunk of the prompt"
    assert len(named(of(collector.spans, "short"), "step")) == 3


@pytest.mark.parametrize(
    ("ratio", "traceparent", "is_traced"),
    [
        (1.0, "", True), (0.0, "", False), (0.0, f"00-{TRACE}-{SPAN}-01", True), (1.0, f"00-{TRACE}-{SPAN}-00", False),
        (1.0, "00-nonsense", True), (0.0, "00-nonsense", False),
    ],
)  # fmt: skip
async def test_who_decides(collector: Collector, ratio: float, traceparent: str, is_traced: bool) -> None:
    async with Cluster(trace_endpoint=collector.address, trace_sample_ratio=ratio) as cluster:
        await cluster.ready()
        running = submit(cluster, PROMPT, request_id="it", traceparent=traceparent, seed=1, max_tokens=5)
        await running.check()
        assert cluster.engine.counters.num_bad_traceparents == ("nonsense" in traceparent)
        assert any(message.traceparents for message in cluster.verifiers[0].received) is is_traced
    assert bool(collector.spans) is is_traced
    if is_traced and TRACE in traceparent:
        root = of(collector.spans, "it")[0]
        assert (root.trace_id, root.parent_id) == (TRACE, SPAN)


async def test_without_a_place_for_spans_nothing_is_traced() -> None:
    async with Cluster() as cluster:
        await cluster.ready()
        running = submit(cluster, PROMPT, traceparent=f"00-{TRACE}-{SPAN}-01", seed=1, max_tokens=5)
        await running.check()
        assert not any(message.traceparents for message in cluster.verifiers[0].received)


@pytest.mark.parametrize("content", [False, True])
async def test_token_ids_only_when_asked_for(collector: Collector, content: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with Cluster(trace_endpoint=collector.address, trace_content=content) as cluster:
        await cluster.ready()
        running = submit(cluster, [501, 502, 503], request_id="it", seed=1, max_tokens=5)
        await running.check()
    root = of(collector.spans, "it")[0]
    if content:
        assert root.attributes["specwire.prompt_token_ids"] == [501, 502, 503]
        assert root.attributes["specwire.generated_token_ids"] == running.sink.choices[0].token_ids
    else:
        assert not any("token_ids" in key for key in root.attributes)
        assert "501" not in repr([span.attributes for span in collector.spans])
    assert "501" not in caplog.text


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


async def test_a_hung_collector_changes_nothing(collector: Collector) -> None:
    """Requests end, and so does the coordinator."""
    collector.released.clear()
    async with asyncio.timeout(60):
        async with Cluster(drafters=[DrafterScript()], min_draft_wait_ms=10_000, trace_endpoint=collector.address) as cluster:
            await cluster.all_there()
            for seed in range(5):
                await submit(cluster, PROMPT, seed=seed, max_tokens=30).check()
            await asyncio.to_thread(collector.called.wait, 20)
            await submit(cluster, PROMPT, seed=9, max_tokens=30).check()
    assert collector.spans == []
