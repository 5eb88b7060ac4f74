"""The event loop never runs the model."""

import logging

import pytest

from benchmarks.health import measure

logger = logging.getLogger(__name__)


@pytest.mark.slow
def test_health_answers_during_a_long_prefill() -> None:
    measured = measure(2100, "bfloat16")
    logger.info("health during a prefill: %s", measured)
    assert measured["checks"] > 50
    assert measured["p99_ms"] <= 50.0, measured
