"""Trace contexts on the wire, and the sample."""

import random

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specwire.tracing import TraceContext, current_traceparent, format_traceparent, is_sampled, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"01-{TRACE}-{SPAN}-01-more", True),
    ],
)
def test_well_formed(text: str, is_taken: bool) -> None:
    assert parse_traceparent(text) == TraceContext(int(TRACE, 16), int(SPAN, 16), is_taken)


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01\n",
        f"01-{TRACE}-{SPAN}-01-{'x' * 500}", "٠٠" + f"-{TRACE}-{SPAN}-01",
    ],
)  # fmt: skip
def test_malformed(text: str) -> None:
    assert parse_traceparent(text) is None


def test_format_is_read_by_opentelemetry_and_by_us() -> None:
    text = format_traceparent(int(TRACE, 16), 7)
    assert parse_traceparent(text) == TraceContext(int(TRACE, 16), 7, True)
    assert text == f"00-{TRACE}-0000000000000007-01"
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, TraceContextTextMapPropagator().extract({"traceparent": text}))
    assert carrier["traceparent"] == text


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_the_sample_is_opentelemetrys(ratio: float) -> None:
    sampler, source = TraceIdRatioBased(ratio), random.Random(5)
    num_sampled = 0
    for _ in range(2000):
        trace_id = source.getrandbits(128)
        expected = sampler.should_sample(None, trace_id, "generate").decision is Decision.RECORD_AND_SAMPLE
        assert is_sampled(trace_id, ratio) is expected
        num_sampled += expected
    assert abs(num_sampled - 2000 * ratio) < 120
    assert is_sampled((1 << 128) - 1, ratio) is (ratio == 1.0)


def test_current_span_of_the_caller() -> None:
    assert current_traceparent() == ""
    for provider, is_taken in ((TracerProvider(), True), (TracerProvider(sampler=ALWAYS_OFF), False)):
        with provider.get_tracer("test").start_as_current_span("outer") as span:
            context = span.get_span_context()
            assert parse_traceparent(current_traceparent()) == (context.trace_id, context.span_id, is_taken)
    assert current_traceparent() == ""
