"""`specwire trace`: reads a trace file and shows its traces as trees."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from specwire.console import make_console
from specwire.errors import InvalidArgumentError
from specwire.tracing.spec import SERVICE_PREFIX

_NUM_LISTED = 30
_FILE_WIDTH = 500  # columns where there is no terminal: one line a span
_ERROR = 2
_PATIENCE_S = 3.0
"""Spans are in the file about a second after their request has ended: so long is a request waited for that is not there yet."""
_LOOK_S = 0.2
_PREFIX = "specwire."


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A span as the file has it; times in Unix nanoseconds. parent_id is empty for a root, error for a span that ended well."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    num_links: int
    error: str

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request, by their start."""

    trace_id: str
    spans: list[FileSpan]

    @property
    def root(self) -> FileSpan:
        """`generate`, or, where the coordinator did not write to the file, what began first."""
        return next((span for span in self.spans if span.name == "generate"), self.spans[0])

    @property
    def request_id(self) -> str:
        return str(self.root.attributes.get("specwire.request_id", ""))


def run_trace(path: Path, *, request_id: str, trace_id: str, last: bool) -> None:
    """Prints the chosen traces, or a list of all.

    Raises:
        InvalidArgumentError: there is no such file or trace.
    """
    console = make_console(_FILE_WIDTH)
    traces, chosen, num_bad_lines = _wait_for_traces(path, request_id, trace_id)
    if num_bad_lines:
        console.print(f"{num_bad_lines} lines of {path} are no OTLP JSON and were left out", style="yellow", markup=False)
    if not traces:
        remedy = f"start the services with --trace-file {path}; spans are written within a second after a request has ended"
        raise InvalidArgumentError(f"{path} has no spans yet; {remedy}")
    if not chosen:
        raise InvalidArgumentError(f"{path} has no trace of {request_id or trace_id!r}; `specwire trace {path}` lists what it has")
    traces = chosen[-1:] if last else chosen
    if request_id or trace_id or last:
        for trace in traces:
            console.print(make_tree(trace))
    else:
        console.print(make_table(traces[-_NUM_LISTED:]))
        console.print(f"{len(traces)} traces; show one with --last, --request ID or --trace-id HEX", style="dim", markup=False)


def _wait_for_traces(path: Path, request_id: str, trace_id: str) -> tuple[list[Trace], list[Trace], int]:
    """All traces of the file, those that were asked for, and the number of lines that can't be read."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        spans, num_bad_lines = read_spans(path)
        traces = group(spans)
        chosen = [trace for trace in traces if (not request_id or trace.request_id == request_id) and trace.trace_id.startswith(trace_id.lower())]
        if chosen or time.monotonic() >= give_up_s:
            return traces, chosen, num_bad_lines
        time.sleep(_LOOK_S)


def read_spans(path: Path) -> tuple[list[FileSpan], int]:
    """All spans of a file, and the number of lines that are none: a service that was killed may have left half a line.

    Raises:
        InvalidArgumentError: it can't be read.
    """
    spans: list[FileSpan] = []
    num_bad_lines = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    spans += _parse(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    num_bad_lines += 1
    except OSError as error:
        raise InvalidArgumentError(f"{path} can't be read ({error.strerror}); give the file that the services' --trace-file named") from error
    return spans, num_bad_lines


def group(spans: Iterable[FileSpan]) -> list[Trace]:
    """Traces by their start."""
    by_id: dict[str, list[FileSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        by_id.setdefault(span.trace_id, []).append(span)
    return [Trace(trace_id, members) for trace_id, members in by_id.items()]


def make_table(traces: Iterable[Trace]) -> Table:
    """One line a trace."""
    table = Table("trace", "request", "ms", "tokens", "spans", "services", "end", box=None, header_style="bold", pad_edge=False)
    for trace in traces:
        root = trace.root
        services = sorted({span.service for span in trace.spans})
        end = Text(root.error, "red") if root.error else Text(",".join(map(str, root.attributes.get("specwire.finish_reasons", ["not ended"]))))
        tokens = str(root.attributes.get("specwire.num_generated_tokens", ""))
        table.add_row(trace.trace_id, trace.request_id, f"{root.duration_ms:.1f}", tokens, str(len(trace.spans)), " ".join(services), end)
    return table


def make_tree(trace: Trace) -> Tree:
    """The spans below their parents, each with its duration and when it began after the root."""
    tree = Tree(Text(f"trace {trace.trace_id}", "bold"))
    nodes = {"": tree}
    known = {span.span_id for span in trace.spans}
    waiting = trace.spans
    start_ns = trace.root.start_ns
    hidden = set() if trace.root.attributes.get("specwire.num_choices", 1) > 1 else {"specwire.choice"}
    while waiting:
        later = []
        for span in waiting:
            parent_id = span.parent_id if span.parent_id in known else ""
            if parent_id in nodes:
                note = f" (its parent {span.parent_id} is not in the file)" if span.parent_id and not parent_id else ""
                nodes[span.span_id] = nodes[parent_id].add(_label(span, start_ns, note, hidden))
            else:
                later.append(span)
        if len(later) == len(waiting):
            raise InvalidArgumentError(f"trace {trace.trace_id} is damaged: {len(later)} of its spans are each other's parents")
        waiting = later
    return tree


def _label(span: FileSpan, start_ns: int, note: str, hidden: set[str]) -> Text:
    text = Text.assemble(
        (span.name, "bold"), f" {span.duration_ms:.2f} ms", (f" +{(span.start_ns - start_ns) / 1e6:.2f}", "cyan"), (f" {span.service}", "magenta")
    )  # fmt: skip
    values = [f"{key.removeprefix(_PREFIX)}={_show(value)}" for key, value in span.attributes.items() if value != "" and key not in hidden]
    values += [f"links={span.num_links}"] if span.num_links else []
    text.append(f" {' '.join(values)}", "dim")
    for event in span.events:
        text.append(f" [{event}]", "yellow")
    if span.error:
        text.append(f" {span.error}", "red")
    text.append(note, "yellow")
    return text


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _parse(request: dict[str, Any]) -> list[FileSpan]:
    """One line: an ExportTraceServiceRequest."""
    spans = []
    for resource_spans in request["resourceSpans"]:
        service = str(_attributes(resource_spans["resource"]).get("service.name", "?")).removeprefix(SERVICE_PREFIX)
        for scope_spans in resource_spans["scopeSpans"]:
            spans += [_parse_span(span, service) for span in scope_spans["spans"]]
    return spans


def _parse_span(span: dict[str, Any], service: str) -> FileSpan:
    status = span.get("status", {})
    events = tuple(" ".join([event["name"], *map(str, _attributes(event).values())]) for event in span.get("events", ()))
    return FileSpan(
        span["traceId"], span["spanId"], span.get("parentSpanId", ""), span["name"], service, int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]), _attributes(span), events, len(span.get("links", ())),
        status.get("message", "ERROR") if status.get("code") == _ERROR else "",
    )  # fmt: skip


def _attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: _value(item["value"]) for item in owner.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    [(kind, content)] = value.items()
    match kind:
        case "intValue":
            return int(content)
        case "arrayValue":
            return [_value(item) for item in content.get("values", ())]
    return content
