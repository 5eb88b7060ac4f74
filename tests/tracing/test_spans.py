"""The coordinator's spans over scripted services: what there is of a request, and what is not."""

import itertools
import logging
import re
from collections import Counter

import pytest

from coordinator.trace_records import StepSample
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript
from tests.tracing.collector import Collector
from tests.tracing.requests import PROMPT, named, of, submit

pytestmark = pytest.mark.usefixtures("patient")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


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
    assert not re.search(r"\b501\b", caplog.text)
