"""The coordinator's counts as vLLM's `LLM.get_metrics()` has them: the same names, kinds and labels."""

from dataclasses import dataclass

from specwire.http.vllm_names import ACCEPTED_AT, vllm_samples
from specwire.messages import CoordinatorStatus
from specwire.metrics import Histogram, Kind

_POSITION = "position"


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows."""

    name: str
    labels: dict[str, str]
    value: int


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that is what it is now."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Vector:
    """Counters by position."""

    name: str
    labels: dict[str, str]
    values: list[int]


Metric = Counter | Gauge | Vector


def read_metrics(status: CoordinatorStatus) -> list[Metric]:
    """What a coordinator has counted since its start."""
    metrics: list[Metric] = []
    by_position: Vector | None = None
    for sample in vllm_samples(status, (), status.model_id):
        name, labels = sample.metric.name.removesuffix("_total"), dict(zip(sample.metric.labels, sample.label_values, strict=True))
        assert not isinstance(sample.value, Histogram), f"{name} is a histogram, though no front end measured it"
        if sample.metric is ACCEPTED_AT:
            del labels[_POSITION]
            if by_position is None:
                by_position = Vector(name, labels, [])
                metrics.append(by_position)
            by_position.values.append(int(sample.value))
        elif sample.metric.kind is Kind.COUNTER:
            metrics.append(Counter(name, labels, int(sample.value)))
        else:
            metrics.append(Gauge(name, labels, float(sample.value)))
    return metrics
