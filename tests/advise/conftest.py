"""The coordinator over scripted services that the benchmarks' tests have."""

from tests.bench.conftest import served

__all__ = ["served"]
