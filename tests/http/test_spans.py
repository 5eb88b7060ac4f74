"""One trace over HTTP service and coordinator."""

from pathlib import Path
from typing import Any

import pytest

from specwire.cli.trace import Trace, group, make_tree, read_spans
from specwire.http.metrics import SPANS
from tests.http.serving import http_served
from tests.http.test_disconnects import hang_up

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0{}"


async def traces_of(folder: Path, *bodies: dict[str, Any], http: dict[str, Any], traceparent: str | None = None) -> tuple[list[Trace], int]:
    """What is in the file when all has ended, and how many spans the HTTP service counts."""
    path = folder / "spans.jsonl"
    headers = {} if traceparent is None else {"traceparent": traceparent}
    async with http_served(folder, coordinator={"trace_file": str(path)}, http=http) as served:
        for body in bodies:
            await served.post("/v1/completions", {"prompt": "a", "max_tokens": 8} | body, **headers)
        await served.until_idle()
        num_spans = served.service.board.own(SPANS)
    return group(read_spans(path)[0]), num_spans


@pytest.mark.parametrize("traceparent", [None, PARENT.format(1)])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_trace(socket_dir: Path, traceparent: str | None, is_streamed: bool) -> None:
    file = {"trace_file": str(socket_dir / "spans.jsonl")}
    [trace], num_spans = await traces_of(socket_dir, {"stream": is_streamed, "user": "me"}, http=file, traceparent=traceparent)
    by_name = {span.name: span for span in trace.spans}
    http, generate = by_name["http"], by_name["generate"]
    assert num_spans == 1
    assert generate.parent_id == http.span_id
    assert http.parent_id == ("" if traceparent is None else "00f067aa0ba902b7")
    assert http.start_ns <= generate.start_ns
    assert (http.service, http.error) == ("http", "")
    assert http.attributes["specwire.is_streamed"] is is_streamed
    assert generate.attributes["specwire.request_id"] == f"{http.attributes['specwire.request_id']} me"
    assert make_tree(trace).children


async def test_who_decides(socket_dir: Path) -> None:
    file = {"trace_file": str(socket_dir / "spans.jsonl")}
    assert await traces_of(socket_dir, {}, http=file, traceparent=PARENT.format(0)) == ([], 0), "the client does"
    assert await traces_of(socket_dir, {}, http=file | {"trace_sample_ratio": 0.0}) == ([], 0), "the HTTP service does for the coordinator, too"
    # Without a place for spans of its own it hands on what the client says.
    assert await traces_of(socket_dir, {}, http={}, traceparent=PARENT.format(0)) == ([], 0)
    [trace], num_spans = await traces_of(socket_dir, {"prompt": ["a", "b"]}, http={}, traceparent=PARENT.format(1))
    assert num_spans == 0
    assert [span.parent_id for span in trace.spans if span.name == "generate"] == ["00f067aa0ba902b7"] * 2
    [_, other], _ = await traces_of(socket_dir, {}, http={}, traceparent="rubbish")
    assert other.trace_id != trace.trace_id


async def test_what_did_not_end_well(socket_dir: Path) -> None:
    bodies: list[dict[str, Any]] = [{"n": 0}, {"prompt": [99_999]}, {"model": "other"}, {"max_tokens": 9_999, "stream": True}]
    traces, _ = await traces_of(socket_dir, *bodies, http={"trace_file": str(socket_dir / "spans.jsonl")})
    assert [[span.name for span in trace.spans] for trace in traces] == [["http"]] * 4
    assert all("INVALID_ARGUMENT" in trace.spans[0].error for trace in traces)


async def test_a_client_that_leaves(socket_dir: Path) -> None:
    path = socket_dir / "spans.jsonl"
    async with http_served(socket_dir, verifier={"delay_s": 0.002}, http={"trace_file": str(path)}) as served:
        await hang_up(served, "in the stream", {"stream": True}, "/v1/completions")
        await hang_up(served, "in the stream", {}, "/v1/completions")
        await served.until_idle()
    errors = [span.error for trace in group(read_spans(path)[0]) for span in trace.spans]
    assert len(errors) == 2
    assert all("CANCELLED" in error for error in errors)
