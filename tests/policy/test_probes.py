"""When probes are due, and that what they lose has a bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.policy.probes import Probes, num_probed_rows, probed_rows


def after_free_ones(share: float) -> Probes:
    probes = Probes(share)
    assert all(probes.is_due(1.0, 1.0) for _ in range(8)), "the first ones come at once"
    return probes


@pytest.mark.parametrize(("share", "loss_ms", "every"), [(0.01, 1.0, 100), (0.01, 0.5, 50), (0.02, 2.0, 100)])
def test_a_probe_is_due_once_its_loss_is_earned(share: float, loss_ms: float, every: int) -> None:
    probes = after_free_ones(share)
    due = [step for step in range(1000) if probes.is_due(1.0, loss_ms)]
    assert np.diff([-1, *due]) == pytest.approx(every, abs=1)


def test_a_promising_one_is_followed_by_others_on_loan() -> None:
    probes = after_free_ones(0.01)
    num_due = 0
    for _ in range(50):
        probes.observe(is_promising=True)
        num_due += probes.is_due(1.0, 1.0)
    assert num_due == 4
    probes.observe(is_promising=False)
    waited = next(step for step in range(1000) if probes.is_due(1.0, 1.0))
    assert 400 < waited < 500, "loans are paid back, and then the next one is earned"


def test_mistakes_are_taken_from_the_credit_but_never_silence_it() -> None:
    probes = after_free_ones(0.01)
    probes.charge(2.0)
    assert next(step for step in range(1000) if probes.is_due(1.0, 1.0)) == pytest.approx(300, abs=2)
    probes.charge(1e9)
    assert next(step for step in range(1000) if probes.is_due(1.0, 1.0)) == pytest.approx(500, abs=2)


def test_a_probe_that_seems_cheap_for_once_forgives_no_debt() -> None:
    probes = after_free_ones(0.01)
    probes.is_due(1.0, 10.0)
    probes.charge(40.0)
    assert not probes.is_due(1.0, 0.1)
    assert not any(probes.is_due(1.0, 10.0) for _ in range(1000)), "at 0.01 a step, 40 take 4000"
    assert next(step for step in range(6000) if probes.is_due(1.0, 10.0)) > 3500


def test_without_a_share_there_are_none() -> None:
    probes = Probes(0.0)
    probes.observe(is_promising=True)
    assert not any(probes.is_due(1.0, 0.1) for _ in range(1000))


@given(st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.1, 5), st.booleans()), min_size=1, max_size=300), st.floats(0.001, 0.05))
def test_what_probes_lose_has_a_bound(steps: list[tuple[float, float, bool]], share: float) -> None:
    """share x time + 13 losses, whatever they show."""
    probes, lost_ms, time_ms = Probes(share), 0.0, 0.0
    for step_ms, loss_ms, is_promising in steps:
        time_ms += step_ms
        if probes.is_due(step_ms, loss_ms):
            lost_ms += loss_ms
            probes.observe(is_promising=is_promising)
    assert lost_ms <= share * time_ms + 13 * max(loss_ms for _, loss_ms, _ in steps) + 1e-6


@pytest.mark.parametrize(("num_rows", "number"), [(0, 0), (1, 1), (3, 3), (4, 4), (64, 4), (65, 5), (256, 16)])
def test_rows_that_a_probe_verifies_take_turns(num_rows: int, number: int) -> None:
    assert num_probed_rows(num_rows) == number
    seen: set[int] = set()
    for probe in range(num_rows):
        rows = range(num_rows)[probed_rows(num_rows, probe)]
        assert len(rows) <= number
        seen.update(rows)
    assert seen == set(range(num_rows))
