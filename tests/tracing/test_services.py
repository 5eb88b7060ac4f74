"""One trace a request across all services: real drafter, real verifier with a tiny model, coordinator and client, each with its own spans."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from specwire import Client
from specwire.client.aio import AsyncClient
from specwire.config import DrafterConfig
from specwire.tracing.spec import SPANS
from tests.drafter.helpers import serve_drafter
from tests.engine.tiny_models import save_tiny_model
from tests.integration.stack import Stack, coordinate, serve_verifier
from tests.integration.tiny import verifier_config
from tests.tracing.collector import Collector, Seen, check_declared, check_tree, collecting

pytestmark = pytest.mark.usefixtures("patient")
NUM_REQUESTS = 200
NUM_TOKENS = 10
ABSENT = {"http", "features"}
"""Of the HTTP service and of draft heads, which have tests of their own."""
HERE = [spec for spec in SPANS if spec.name not in ABSENT]
EDGES = {(parent, spec.name) for spec in HERE for parent in spec.parents if parent not in ABSENT}
ATTRIBUTES = {(spec.name, attribute) for spec in HERE for attribute in {**spec.attributes, **spec.optional}}
CONTENT = {("generate", "specwire.prompt_token_ids"), ("generate", "specwire.generated_token_ids")}
"""What is there only if somebody asks for it; test_spans.py does."""
MOVED = {("step", "specwire.discarded")}
"""What requests that end well have only if they move to another lane meanwhile."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tracing") / "tiny"
    save_tiny_model(path)
    return path


@contextlib.asynccontextmanager
async def traced_stack(socket_dir: Path, model: Path, collector: Collector, *, num_seqs: int = 32) -> AsyncIterator[Stack]:
    """Two ngram drafters, two verifiers, a coordinator and a client of it; their spans go to the collector."""
    async with contextlib.AsyncExitStack() as resources:
        verifiers, drafters = [], []
        for index in range(2):
            config = verifier_config(model, max_num_seqs=num_seqs, num_kv_blocks=256, trace_endpoint=collector.address)
            verifiers.append((await resources.enter_async_context(serve_verifier(socket_dir, config, name=f"v{index}")))[1])
            drafter = DrafterConfig(max_num_seqs=4 * num_seqs, trace_endpoint=collector.address)
            drafters.append((await resources.enter_async_context(serve_drafter(socket_dir, drafter, name=f"d{index}"))).addresses[0])
        # Every step has spans: links are compared with whole rounds.
        coordinator = coordinate(socket_dir, verifiers, drafters, trace_endpoint=collector.address, trace_max_steps=32)
        yield await resources.enter_async_context(coordinator)


async def test_200_concurrent_requests(socket_dir: Path, model: Path) -> None:
    """Every request's trace has every edge that is declared, in the right places and times; nothing is crossed."""
    provider = TracerProvider()
    parents: dict[str, tuple[str, str]] = {}

    async def generate(client: AsyncClient, index: int) -> None:
        prompt = [10 + index % 50, 60 + index % 7, 11, 12] * 3
        name = f"r{index}"
        if index % 2:
            await client.generate(prompt, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, request_id=name)
            return
        with provider.get_tracer("test").start_as_current_span("client") as span:
            context = span.get_span_context()
            parents[name] = format_trace_id(context.trace_id), format_span_id(context.span_id)
            await client.generate(prompt, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, request_id=name)

    with collecting() as collector:
        async with traced_stack(socket_dir, model, collector) as stack:
            await asyncio.gather(*(generate(stack.client, index) for index in range(NUM_REQUESTS)))
    spans = collector.spans
    check_declared(spans)
    assert len({span.instance for span in spans}) == 5
    traces: dict[str, list[Seen]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == NUM_REQUESTS
    names = Counter[str]()
    for trace in traces.values():
        by_id = check_tree(trace)
        [root] = [span for span in trace if span.name == "generate"]
        name = root.attributes["specwire.request_id"]
        names[name] += 1
        assert (root.trace_id, root.parent_id) == parents.get(name, (root.trace_id, ""))
        edges = Counter((by_id[span.parent_id].name, span.name) for span in trace if span is not root)
        assert set(edges) == EDGES, f"{name}: {EDGES - set(edges)} are missing"
        # Each row that was sent was run, once; each drafter that was asked has drafted. A sequence may move to another lane in a step.
        num_discarded = sum("specwire.discarded" in span.attributes for span in trace)
        assert edges["verify", "forward"] == edges["step", "verify"] >= edges["generate", "step"] - num_discarded
        assert edges["propose", "draft"] == edges["step", "propose"] > 0
        for child_name in ("forward", "draft"):
            children = [span.parent_id for span in trace if span.name == child_name]
            assert len(set(children)) == len(children)
        check_rounds(trace, by_id)
    assert names == {f"r{index}": 1 for index in range(NUM_REQUESTS)}
    check_links(spans)
    assert {(span.name, attribute) for span in spans for attribute in span.attributes} | MOVED == ATTRIBUTES - CONTENT


def check_rounds(trace: list[Seen], by_id: dict[str, Seen]) -> None:
    """A service's span is of the very round that the coordinator sent."""
    for span in trace:
        if span.name == "forward":
            verify = by_id[span.parent_id]
            step = by_id[verify.parent_id]
            assert span.attributes["specwire.round"] == verify.attributes["specwire.round"]
            assert span.attributes["specwire.lane"] == step.attributes["specwire.lane"]
            assert span.attributes["specwire.num_rows"] == step.attributes["specwire.num_rows"]
            assert span.instance == verify.attributes["specwire.verifier"].rpartition("/")[2]


def check_links(spans: list[Seen]) -> None:
    """Steps of one round link to each other's requests, and to nobody else's."""
    batches: dict[tuple[int, int], set[str]] = {}
    for span in spans:
        if span.name == "forward":
            batches.setdefault((span.attributes["specwire.lane"], span.attributes["specwire.round"]), set()).add(span.trace_id)
    by_id = {span.span_id: span for span in spans}
    num_links = 0
    for span in spans:
        if span.name == "verify":
            step = by_id[span.parent_id]
            batch = batches[step.attributes["specwire.lane"], span.attributes["specwire.round"]]
            linked = {trace_id for trace_id, _ in step.links}
            assert linked == batch - {span.trace_id}
            assert all(by_id[span_id].name == "generate" for _, span_id in step.links)
            num_links += len(linked)
    assert num_links > 0


async def test_the_synchronous_client_hands_on_its_callers_span(socket_dir: Path, model: Path) -> None:
    with collecting() as collector:
        async with traced_stack(socket_dir, model, collector, num_seqs=4) as stack:

            def call() -> tuple[str, str]:
                with Client(stack.address) as client, TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
                    client.generate([10, 11, 12], max_tokens=3, request_id="generated")
                    assert list(client.stream([10, 11, 12], max_tokens=3, request_id="streamed"))
                    context = span.get_span_context()
                    return format_trace_id(context.trace_id), format_span_id(context.span_id)

            parent = await asyncio.to_thread(call)
    roots = {span.attributes["specwire.request_id"]: (span.trace_id, span.parent_id) for span in collector.spans if span.name == "generate"}
    assert roots == {"generated": parent, "streamed": parent}
