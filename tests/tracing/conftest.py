"""What tests of tracing share."""

from collections.abc import Iterator

import pytest

from tests.tracing.collector import Collector, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector
