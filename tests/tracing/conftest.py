"""What tests of tracing share."""

from collections.abc import Iterator

import pytest

from specwire.tracing import Tracer
from tests.tracing.collector import Collector, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that stops waits until its spans are out. Otherwise it gives up after a second, which a busy machine may need for more."""
    monkeypatch.setattr(Tracer.close, "__defaults__", (60.0,))
