"""A span of this program around a call: the services' spans continue its trace."""

import argparse

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from specwire import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--address", default="127.0.0.1:50050", help="the coordinator: host:port or unix:path")
    arguments = parser.parse_args()

    trace.set_tracer_provider(TracerProvider())  # add a span processor with your exporter to see this program's spans too
    tracer = trace.get_tracer("example")
    with Client(arguments.address) as client, tracer.start_as_current_span("answer") as span:
        result = client.generate(arguments.prompt, max_tokens=32, request_id="trace-example")

    print(result.text)
    print(f"trace id {span.get_span_context().trace_id:032x}")
    print("with services started by `specwire up --trace-file spans.jsonl`, look at it with: specwire trace spans.jsonl --last")


if __name__ == "__main__":
    main()
