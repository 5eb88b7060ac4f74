"""What a record with the largest K says of smaller ones."""

import numpy as np
import pytest

from specwire.advise.drafts import AnswerDrafts, calibrated_survivals, expected_yield, synthetic_yield
from specwire.bench.record import RequestRecord
from specwire.bench.workload import Prompt
from specwire.messages import DraftReport, SpecStats
from tests.advise.answers import answer, random_outcomes, walk

MOST = 6


def test_an_answer_by_hand() -> None:
    """Seven tokens in steps of up to 3 drafts: 3 of 3, 1 of 3, 0 of 3 accepted, so that tokens 1-3 and 5 are known to be good, 6 and 7 to be bad;
    the fourth is not known, and is taken to be good with 2/3: the share of drafts behind an accepted one. With one draft a step, tokens go (1 2)
    (3 4) (5 6) (7); with two, (1 2 3) (4 5 6) (7), or (1 2 3) (4) (5 6) (7). Two plain steps are plain with any K."""
    found = expected_yield([AnswerDrafts((3, 3, 3), (3, 1, 0), (0.5,) * 9, num_plain=2)], 3)
    assert found.tokens == pytest.approx((1.0, 9 / 6, 9 / (2 + 10 / 3), 9 / 5))
    assert found.share == pytest.approx((0.0, 4 / 6, (10 / 3) / (2 + 10 / 3), 3 / 5))
    assert found.drafts == pytest.approx((0.0, 1.0, 2.0, 3.0))


@pytest.mark.parametrize("rates", [(0.8,), (0.9, 0.3)], ids=["uniform", "mixed"])
def test_smaller_k_is_what_a_run_with_it_gives(rates: tuple[float, ...]) -> None:
    outcomes = [random_outcomes(rates[index % len(rates)], 400, index) for index in range(40)]
    found = expected_yield([answer(each, MOST) for each in outcomes], MOST)
    for k in range(1, MOST + 1):
        steps = sum(len(walk(each, k)[0]) for each in outcomes)
        assert found.tokens[k] == pytest.approx(40 * 400 / steps, rel=0.02), k
    assert found.share[1:] == (1.0,) * MOST
    # At the largest K nothing is estimated, but for drafts that would have gone past the end.
    assert found.drafts[MOST] == pytest.approx(MOST, rel=0.02)


def test_passages_that_are_guessed_well_do_not_make_small_k_look_bad() -> None:
    """Half of the text is copied: runs of 24 good tokens between 24 that the drafter has no draft for. By rates at each position, K = 1 would get
    1 + (share of steps with drafts at the largest K, a quarter); it gets more, for it begins more steps inside of runs."""
    runs = [np.r_[np.ones(23, bool), False] for _ in range(50)]
    recorded = [walk(run, MOST) for run in runs]
    joined = AnswerDrafts(
        tuple(n for drafts, _ in recorded for n in drafts), tuple(n for _, accepted in recorded for n in accepted),
        (0.8,) * sum(sum(drafts) for drafts, _ in recorded), num_plain=50 * 24,
    )  # fmt: skip
    found = expected_yield([joined], MOST)
    assert found.tokens[1] == pytest.approx(48 / (24 + 12), rel=0.01)
    assert found.share[1] == pytest.approx(12 / 36, rel=0.01)
    assert synthetic_yield([joined], MOST).tokens[1] == pytest.approx(1 + 4 / 28, rel=0.05)


def test_weights_count() -> None:
    good, bad = np.ones(60, bool), np.zeros(60, bool)
    heavy = expected_yield([answer(good, 3, weight=3.0), answer(bad, 3)], 3)
    assert heavy.tokens[3] == pytest.approx(4 * 60 / (3 * 15 + 60))
    assert heavy.share[3] == 1.0


@pytest.mark.parametrize("answers", [[], [AnswerDrafts()], [AnswerDrafts(num_plain=20)]])
def test_nothing_drafted(answers: list[AnswerDrafts]) -> None:
    for found in (expected_yield(answers, 2), synthetic_yield(answers, 2)):
        assert (found.tokens, found.share) == ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
    assert (calibrated_survivals(answers, 2) < 0).all()


def test_configured_rates_are_those_of_positions() -> None:
    """Synthetic acceptance: 0.9 for the first draft, 0.5 for the second if the first was accepted, then 0."""
    rng = np.random.default_rng(1)
    accepted = [int(rng.random() < 0.9) and 1 + int(rng.random() < 0.5) for _ in range(4000)]
    found = synthetic_yield([AnswerDrafts((3,) * 4000, tuple(accepted), (0.5,) * 12000)], 3)
    assert found.tokens == pytest.approx((1.0, 1.9, 2.35, 2.35), rel=0.02)
    assert found.drafts == pytest.approx((0.0, 1.0, 2.0, 3.0))


def test_survivals_tell_good_rows_from_bad_ones() -> None:
    """Scores are right about which answers are good, but not about how good: calibration finds that out."""
    answers = [answer(random_outcomes(0.9, 300, seed), 4, score=0.6) for seed in range(8)]
    answers += [answer(random_outcomes(0.2, 300, seed), 4, score=0.4, num_plain=10) for seed in range(8, 16)]
    found = calibrated_survivals(answers, 4)
    assert found.shape == (sum(len(each.num_drafts) + each.num_plain for each in answers), 4)
    offered = found[found[:, 3] >= 0]
    good, bad = offered[offered[:, 0] > 0.5], offered[offered[:, 0] < 0.5]
    assert good.mean(axis=0) == pytest.approx([0.9, 0.81, 0.73, 0.66], abs=0.05)
    assert bad.mean(axis=0)[:2] == pytest.approx([0.2, 0.04], abs=0.05)
    assert (found[:, 0] < 0).sum() == 80


def test_an_answer_of_a_request() -> None:
    record = RequestRecord(0, 4, 0.0, 0.0)
    record.spec = SpecStats(num_drafts=2, num_draft_tokens=5, num_accepted_tokens=3, num_steps=6)
    record.drafts = DraftReport([3, 2], [3, 0], [0.5] * 5)
    prompt = Prompt("a", [1, 2, 3, 4], 16, weight=2.0)
    # The first token comes with the prompt: a step that never has drafts.
    assert AnswerDrafts.of(prompt, record) == AnswerDrafts((3, 2), (3, 0), (0.5,) * 5, 3, 2.0)
    record.drafts = None
    assert AnswerDrafts.of(prompt, record) == AnswerDrafts(num_plain=3, weight=2.0)
