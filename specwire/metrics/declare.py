"""What a service's metrics are called and mean: declared as data, which the endpoint, the documentation and the dashboard are checked against."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from specwire.metrics.histogram import Histogram


class Kind(StrEnum):
    """Gauges are only for what is a state; everything else never goes backwards while the process lives."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series.

    Args:
        name: specwire_<service>_<what>_<unit>; a counter's ends with _total.
        text: what it says, in half a sentence.
        labels: names of its labels.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.kind is Kind.COUNTER) == self.name.endswith("_total"), (
            f"{self.name} is a {self.kind}: counters end with _total, and nothing else does"
        )


def make_counter(service: str, what: str, text: str, *labels: str) -> Metric:
    """Named specwire_<service>_<what>_total."""
    return Metric(f"specwire_{service}_{what}_total", Kind.COUNTER, text, labels)


def make_gauge(service: str, what: str, text: str, *labels: str) -> Metric:
    """Named specwire_<service>_<what>."""
    return Metric(f"specwire_{service}_{what}", Kind.GAUGE, text, labels)


def make_histogram(service: str, what: str, text: str, *labels: str) -> Metric:
    """Named specwire_<service>_<what>."""
    return Metric(f"specwire_{service}_{what}", Kind.HISTOGRAM, text, labels)


class Sample(NamedTuple):
    """One series of a family: a number, or a histogram as it is now."""

    metric: Metric
    label_values: tuple[str, ...]
    value: "float | Histogram"
