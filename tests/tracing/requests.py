"""Requests with labels, and their traces."""

from typing import Any

from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from tests.scripted.cluster import Cluster, Running
from tests.scripted.collect import CollectingSink
from tests.tracing.collector import Seen, check_declared, check_tree

PROMPT = [5, 6, 7, 8, 9]


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
