"""Step 1 and step 2: pure parts."""

import pytest

from specwire.advise.candidates import Candidate, absent, choose, sentences
from specwire.advise.lookup import Repetition
from specwire.advise.workload import PlainRun, Rate, Workload, growth, num_running

ALONE, FULL = PlainRun(1, 0.5, 50.0, 20.0, 2.0), PlainRun(16, 4.0, 400.0, 40.0, 4.0)


def test_growth_by_doubling() -> None:
    """Nearly free up to four at once, and each twice as many all but twice as slow beyond."""
    some = PlainRun(4, 2.0, 200.0, 22.0, 2.2)
    low, high = (growth(number, ALONE, some, FULL) for number in (2, 9))
    assert low == pytest.approx(1.1**0.5 - 1)
    assert high == pytest.approx((40 / 22) ** 0.5 - 1)
    assert growth(4, ALONE, some, FULL) == low
    assert growth(1, ALONE, ALONE, FULL) == pytest.approx(2 ** (1 / 4) - 1)
    assert growth(1, ALONE, ALONE, ALONE) == 0.0


@pytest.mark.parametrize(("rate", "expected"), [(0.01, 1), (0.5, 1), (1.0, 2), (100.0, 16)])
def test_sequences_at_once(rate: float, expected: int) -> None:
    assert num_running(rate, ALONE, FULL) == expected


def test_what_bounds_it() -> None:
    low, high = Rate("low", 1.0, 0.25, 1, 0.1), Rate("high", 6.0, 1.5, 16, 0.9)
    workload = Workload(8, 30, 60, Repetition(0.25, 0.125, 0.0625, 3.0, 2.0), ALONE, ALONE, FULL, low, high, 0.5)
    assert (workload.bound(low), workload.bound(high)) == ("latency", "throughput")
    text = " ".join(workload.sentences())
    for words in (
        "8 prompts of 30 tokens",
        "38% of the answers' tokens",
        "150% of that is asked for, and about 16 run at once",
        "400.0 tokens/s (4.00 requests/s)",
    ):
        assert words in text


def test_the_best_drafter_that_is_there() -> None:
    lookup = Candidate("ngram", "a:1", 3.0, 1.3, 5, 0.1, 0.2)
    model = Candidate("draft_model", "b:1", 3.5, 2.9, 5, 5.0, 0.6)
    assert choose([lookup, model]) is model
    assert choose([model, Candidate("suffix", "c:1", 4.0, 1.6, gain=0.6)]) is model
    [said] = sentences([lookup, model], model)
    assert "draft_model at b:1 is the best of 2" in said
    assert "ngram at a:1 +20.0%" in said
    [alone] = sentences([lookup], lookup)
    assert "the only drafter that is there" in alone


def test_without_costs_tokens_count() -> None:
    many, few = Candidate("eagle3", "a:1", 3.0, 2.5), Candidate("ngram", "b:1", 5.0, 1.4)
    assert choose([few, many]) is many
    assert "tokens a step, since costs are not known: 2.50" in sentences([few, many], many)[0]


def test_what_is_not_there() -> None:
    repetition = Repetition(0.5, 0.1, 0.2, 4.0, 2.0)
    found = absent([Candidate("draft_model", "a:1")], repetition, 5)
    assert [each.method for each in found] == ["ngram", "suffix"]
    assert (found[0].acceptance_length, found[0].tokens_per_step, found[0].address) == (4.0, 2.0, "")
    assert [each.method for each in absent([Candidate("ngram+suffix", "a:1")], repetition, 5)] == ["draft_model or a head"]
