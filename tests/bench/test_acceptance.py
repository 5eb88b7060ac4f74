"""Acceptance by category and weight, calibration and comparison, beside what comes out by hand."""

import math

import pytest

from specwire.bench.accept import AcceptOptions, choose_lines, parse_weights
from specwire.bench.acceptance import Difference, find_differences, measure_acceptance
from specwire.bench.calibration import Observations, calibrate
from specwire.bench.record import RequestRecord
from specwire.bench.workload import Prompt, PromptLine
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftReport, SpecStats

NAN = float("nan")
# Three verifications: all of 2 accepted; 0 of 3; 1 of 2.
REPORT = DraftReport([2, 3, 2], [2, 0, 1], [0.9, 0.8, 0.3, 0.2, 0.1, 0.9, 0.4])
STATS = SpecStats(3, 7, 3, (2, 1, 0), num_steps=4)


def answer(name: str, category: str, weight: float, stats: SpecStats, report: DraftReport | None, num_tokens: int) -> tuple[Prompt, RequestRecord]:
    record = RequestRecord(int(name), 4, 0.0, 0.0, 1.0, [1.0], [num_tokens], spec=stats, drafts=report)
    return Prompt(name, [1, 2, 3, 4], 64, category, weight), record


def test_observed_are_drafts_up_to_the_first_rejection() -> None:
    observations = Observations.of([REPORT])
    assert observations.positions.tolist() == [0, 1, 0, 0, 1]
    assert observations.scores.tolist() == [0.9, 0.8, 0.3, 0.9, 0.4]
    assert observations.accepted.tolist() == [True, True, False, True, False]
    assert (observations.at(0).rate, observations.at(1).rate, observations.at(2).rate) == (2 / 3, 0.5, 0.0)


def test_calibration() -> None:
    """Bins of 0.5: (0.3, 0.4) none accepted of 2, mean 0.35; (0.9, 0.8, 0.9) all of 3, mean 2.6 / 3."""
    calibration = calibrate(Observations.of([REPORT]), 2)
    assert [(entry.low, entry.high, entry.num_observed, entry.num_accepted) for entry in calibration.bins] == [(0, 0.5, 2, 0), (0.5, 1, 3, 3)]
    assert [entry.mean_score for entry in calibration.bins] == pytest.approx([0.35, 2.6 / 3])
    assert calibration.error == pytest.approx((2 * 0.35 + 3 * (1 - 2.6 / 3)) / 5)


def test_scores_of_0_and_1_and_none() -> None:
    calibration = calibrate(Observations.of([DraftReport([1, 1, 1], [1, 0, 1], [1.0, 0.0, NAN])]), 10)
    assert (calibration.num_observed, calibration.num_unscored, calibration.error) == (2, 1, 0.0)
    assert [(entry.low, entry.rate) for entry in calibration.bins] == [(0.0, 0.0), (0.9, 1.0)]
    nothing = calibrate(Observations.of([]))
    assert (nothing.num_observed, nothing.error, nothing.bins) == (0, 0.0, ())


def test_a_drafter_whose_scores_are_probabilities_is_calibrated() -> None:
    """A quarter of the drafts scored 0.25 accepted, three quarters of those scored 0.75."""
    report = DraftReport([1] * 8, [1, 0, 0, 0, 1, 1, 1, 0], [0.25] * 4 + [0.75] * 4)
    assert calibrate(Observations.of([report])).error == 0.0


def test_groups_and_weights() -> None:
    other = SpecStats(1, 1, 1, (1,), num_steps=1)
    answers = [
        answer("0", "code", 1.0, STATS, REPORT, 7), answer("1", "chat", 3.0, other, DraftReport([1], [1], [0.6]), 2),
        answer("2", "code", 1.0, SpecStats(num_steps=5), None, 5),
    ]  # fmt: skip
    total, code, chat = measure_acceptance(answers)
    assert [group.name for group in (total, code, chat)] == ["total", "code", "chat"]
    assert (code.num_prompts, code.weight, code.num_output_tokens, code.stats) == (2, 2.0, 12, SpecStats(3, 7, 3, (2, 1, 0), num_steps=9))
    assert (code.acceptance_rate, code.acceptance_length, code.tokens_per_step) == pytest.approx((3 / 7, 2.0, 12 / 9))
    assert (chat.acceptance_rate, chat.acceptance_length, chat.tokens_per_step) == (1.0, 2.0, 2.0)
    # Weighted: code counts once, chat three times.
    assert total.stats == SpecStats(4, 8, 4, (3, 1, 0), num_steps=10)
    assert total.acceptance_rate == pytest.approx((3 + 3 * 1) / (7 + 3 * 1))
    assert total.acceptance_length == pytest.approx(1 + (3 + 3 * 1) / (3 + 3 * 1))
    assert total.tokens_per_step == pytest.approx((12 + 3 * 2) / (9 + 3 * 1))
    assert [entry.unconditional for entry in total.positions] == pytest.approx([(2 + 3) / 6, 1 / 6, 0])
    assert [entry.conditional for entry in total.positions] == pytest.approx([3 / 4, 1 / 2, 0])
    assert [entry.num_observed for entry in total.positions] == [4, 2, 0]


def test_a_coordinator_that_reports_no_verifications() -> None:
    [total, _] = measure_acceptance([answer("0", "code", 1.0, STATS, None, 7)])
    assert (total.calibration, total.positions[0].conditional) == (None, None)


def test_nothing_answered_and_no_categories() -> None:
    [total] = measure_acceptance([])
    assert (total.num_prompts, total.acceptance_length, total.positions) == (0, 1.0, ())
    assert len(measure_acceptance([answer("0", "", 1.0, STATS, None, 7)])) == 1


def test_differences() -> None:
    def record(index: int, token_ids: list[int], error: str = "") -> RequestRecord:
        return RequestRecord(index, 1, 0.0, 0.0, token_ids=token_ids, error=error)

    prompts = [Prompt(f"p{index}", [1], 8) for index in range(6)]
    drafted = [record(0, [1, 2]), record(1, [1, 2, 3]), record(2, [1]), record(3, [1, 2]), record(4, [9], "InternalError"), record(5, [1])]
    plain = [record(0, [1, 2]), record(1, [1, 5, 3]), record(2, [1, 2]), record(3, [1]), record(4, [1])]
    assert find_differences(prompts, drafted, plain) == [Difference("p1", 1), Difference("p2", 1), Difference("p3", 1)]


LINES = [PromptLine(str(i), "text", category, 1.0) for i, category in enumerate(["a", "b", "a", "a"])]


def options(tmp: str = "x", **values: object) -> AcceptOptions:
    return AcceptOptions("unix:x", tmp, **values)  # type: ignore[arg-type]


def test_choosing_lines() -> None:
    assert [line.name for line in choose_lines(LINES, options())] == ["0", "2", "3", "1"]
    assert [line.name for line in choose_lines(LINES, options(num_prompts=2))] == ["0", "2", "1"]
    assert [line.name for line in choose_lines(LINES, options(categories=("b",)))] == ["1"]
    weighted = choose_lines(LINES, options(weights={"a": 6.0, "b": 1.0}))
    assert [line.weight for line in weighted] == [2.0, 2.0, 2.0, 1.0]
    with pytest.raises(InvalidArgumentError, match="no category 'c'; it has 'a', 'b'"):
        choose_lines(LINES, options(categories=("c",)))
    with pytest.raises(InvalidArgumentError, match="no weight of the category 'b'"):
        choose_lines(LINES, options(weights={"a": 1.0}))


def test_parsing_weights() -> None:
    assert parse_weights("a=2, b=0.5") == {"a": 2.0, "b": 0.5}
    assert parse_weights("") == {}
    for text in ("a", "a=", "=1", "a=-1", "a=nan", f"a={math.inf}", "a=0"):
        with pytest.raises(InvalidArgumentError, match="--weights"):
            parse_weights(text)
