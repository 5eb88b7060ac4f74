"""Metrics of a service: what is declared, histograms that are cheap to fill, and the endpoint that Prometheus reads.

Values are plain numbers that the service counts anyway. They are read when somebody asks, on another thread than the one that counts:
every read is of one number, or a copy of a list or dictionary made at once, so that no lock is needed and no counter is seen going back.
"""

from specwire.metrics.declare import Kind, Metric, Sample, make_counter, make_gauge, make_histogram
from specwire.metrics.histogram import LATENCY_BOUNDS, NUM_TOKENS_BOUNDS, STEP_BOUNDS, Histogram
from specwire.metrics.serve import MetricsServer

__all__ = [
    "LATENCY_BOUNDS", "NUM_TOKENS_BOUNDS", "STEP_BOUNDS", "Histogram", "Kind", "Metric", "MetricsServer", "Sample",
    "make_counter", "make_gauge", "make_histogram",
]  # fmt: skip
