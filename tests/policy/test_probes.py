"""When probes are due, and that what they lose has a bound."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.policy.probes import Probes, num_probed_rows, probed_rows


def steps_until_due(probes: Probes, loss_ms: float = 1.0, **options: Any) -> int:
    """Steps of 1 ms without a probe before the next one."""
    return next(step for step in range(10_000) if probes.is_due(1.0, loss_ms, **options))


@pytest.mark.parametrize(("share", "loss_ms", "every"), [(0.01, 1.0, 100), (0.01, 0.5, 50), (0.02, 2.0, 100)])
def test_a_probe_is_due_once_its_loss_is_earned(share: float, loss_ms: float, every: int) -> None:
    """The first one, too."""
    probes = Probes(share)
    due = [step for step in range(1000) if probes.is_due(1.0, loss_ms)]
    assert np.diff([-1, *due]) == pytest.approx(every, abs=1)


def test_what_cannot_pay_is_seldom_tried() -> None:
    assert steps_until_due(Probes(0.01), is_hopeless=True) == pytest.approx(800, abs=2)


def test_drafters_that_have_not_answered_yet_may_be_late() -> None:
    probes = Probes(0.01)
    assert steps_until_due(probes, wait_ms=3.0) == pytest.approx(400, abs=2)
    probes.settle(4.0, is_answered=False)
    assert steps_until_due(probes, wait_ms=3.0) == pytest.approx(400, abs=2)
    probes.settle(1.0, is_answered=True)
    assert steps_until_due(probes, wait_ms=3.0) < 20, "it cost less than was set aside"


def test_a_probe_costs_what_it_took() -> None:
    """And the next one is taken to cost more, too."""
    probes = Probes(0.01)
    steps_until_due(probes)
    probes.settle(3.0, is_answered=True)
    assert steps_until_due(probes) == pytest.approx(350, abs=2), "two that were not earned, and one and a half times the table's loss"
    for _ in range(8):
        probes.settle(3.0, is_answered=True)
        last = steps_until_due(probes)
    assert last == pytest.approx(300, abs=10), "what all of them took"


def test_one_that_takes_very_long_does_not_end_all_others() -> None:
    """The first one may find peers that have never drafted."""
    probes = Probes(0.01)
    steps_until_due(probes)
    probes.settle(100.0, is_answered=True)
    assert steps_until_due(probes) < 1000, "the debt has a bound, and the next one is expected to cost one and a half times the table's loss"


def test_it_waits_until_it_can_show_something() -> None:
    probes = Probes(0.01)
    assert not any(probes.is_due(1.0, 1.0, is_ready=lambda: False) for _ in range(200))
    assert probes.is_near
    assert probes.is_due(1.0, 1.0)
    assert not probes.is_due(1.0, 1.0)
    assert not probes.is_near


def test_a_promising_one_is_followed_by_others_on_loan() -> None:
    """As many as half of what was ever earned covers, four at most."""
    probes = Probes(0.01)
    num_due = []
    for num_steps in (150, 5000):
        for _ in range(num_steps):
            probes.is_due(1.0, 1.0)
        num_due.append(0)
        for _ in range(20):
            probes.observe(is_promising=True)
            num_due[-1] += probes.is_due(1.0, 1.0)
    assert num_due[0] <= 1
    assert num_due[1] == 4
    probes.observe(is_promising=False)
    assert 400 < steps_until_due(probes) < 500, "loans are paid back, and then the next one is earned"


def test_mistakes_are_taken_from_the_credit_but_never_silence_it() -> None:
    probes = Probes(0.01)
    steps_until_due(probes)
    probes.charge(0.5)
    assert steps_until_due(probes) == pytest.approx(150, abs=2)
    probes.charge(1e9)
    assert steps_until_due(probes) == pytest.approx(300, abs=2), "two steps' time and the next probe's"


def test_a_probe_that_seems_cheap_for_once_forgives_no_debt() -> None:
    probes = Probes(0.01)
    probes.is_due(1.0, 10.0)
    probes.charge(10.0)
    assert not probes.is_due(1.0, 0.1)
    assert not any(probes.is_due(1.0, 10.0) for _ in range(1000)), "at 0.01 a step, 10 take 1000"
    assert steps_until_due(probes, 10.0) > 800


def test_without_a_share_there_are_none() -> None:
    probes = Probes(0.0)
    probes.observe(is_promising=True)
    assert not any(probes.is_due(1.0, 0.1) for _ in range(1000))


@pytest.mark.parametrize("is_answered", [True, False])
def test_probes_that_always_take_longer_than_tables_say_come_less_often(is_answered: bool) -> None:
    probes, time_ms, lost_ms = Probes(0.01), 0.0, 0.0
    for _ in range(20_000):
        time_ms += 10.0
        if probes.is_due(10.0, 2.0, 20.0):
            lost_ms += 50.0
            probes.settle(50.0, is_answered=is_answered)
    assert 0 < lost_ms <= 0.015 * time_ms


@given(st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.1, 5), st.booleans()), min_size=1, max_size=300), st.floats(0.001, 0.05))
def test_what_probes_lose_has_a_bound(steps: list[tuple[float, float, bool]], share: float) -> None:
    """Half more than the share of the time, and no more than four losses beyond it, whatever they show."""
    probes, lost_ms, time_ms = Probes(share), 0.0, 0.0
    for step_ms, loss_ms, is_promising in steps:
        time_ms += step_ms
        if probes.is_due(step_ms, loss_ms):
            lost_ms += loss_ms
            probes.observe(is_promising=is_promising)
    most_ms = max(loss_ms for _, loss_ms, _ in steps)
    assert lost_ms <= min(1.5 * share * time_ms, share * time_ms + 4 * most_ms) + 1e-6


@pytest.mark.parametrize(("num_rows", "number"), [(0, 0), (1, 1), (3, 3), (4, 4), (64, 4), (65, 5), (256, 16)])
def test_rows_that_a_probe_verifies_take_turns(num_rows: int, number: int) -> None:
    assert num_probed_rows(num_rows) == number
    seen: set[int] = set()
    for probe in range(num_rows):
        rows = range(num_rows)[probed_rows(num_rows, probe)]
        assert len(rows) <= number
        seen.update(rows)
    assert seen == set(range(num_rows))
