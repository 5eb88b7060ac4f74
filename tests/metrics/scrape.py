"""Reads metrics as Prometheus does: through the text format."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specwire.metrics import Metric, Sample
from specwire.metrics.endpoint import Collector

Labels = tuple[tuple[str, str], ...]
Series = dict[tuple[str, Labels], float]
"""(name, labels in order of their names) -> value."""


def make_scraper(metrics: Sequence[Metric], collect: Callable[[], Iterable[Sample]]) -> Callable[[], Series]:
    """What an endpoint over these metrics would answer, each time that it is called."""
    registry = CollectorRegistry()
    registry.register(Collector(metrics, collect))
    return lambda: parse(generate_latest(registry).decode())


def parse(text: str) -> Series:
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in series, f"{key} is there twice"
            series[key] = sample.value
    return series


def by_name(series: Series, name: str) -> dict[Labels, float]:
    """All series of one name, by their labels."""
    return {labels: value for (other, labels), value in series.items() if other == name}


def value(series: Series, name: str, **labels: str) -> float:
    """One series."""
    return series[name, tuple(sorted(labels.items()))]


def series_of(metric: Metric) -> tuple[str, ...]:
    """The names under which a family's samples appear."""
    return tuple(f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count")) if metric.kind == "histogram" else (metric.name,)


def only_grows(metrics: Sequence[Metric]) -> set[str]:
    """Names of all series that may never go backwards."""
    return {name for metric in metrics if metric.kind != "gauge" for name in series_of(metric)}


def check_growth(metrics: Sequence[Metric], before: Series, now: Series) -> None:
    """No counter, bucket, sum or count is less than it was, or gone; buckets of a histogram ascend and end with its count."""
    growing = only_grows(metrics)
    for key, count in before.items():
        if key[0] in growing:
            assert key in now, f"{key} is gone"
            assert now[key] >= count, f"{key} went from {count} to {now[key]}"
    totals: dict[tuple[str, Labels], float] = {}
    for (name, labels), count in now.items():
        if name.endswith("_bucket"):
            key = name, tuple(label for label in labels if label[0] != "le")
            assert count >= totals.get(key, 0), f"{name}{labels} is below the bucket before it"
            totals[key] = count
    for (name, labels), count in totals.items():
        assert now[name.removesuffix("_bucket") + "_count", labels] == count, f"{name}{labels}"
