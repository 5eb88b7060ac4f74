"""Steps from what a client saw of runs; times are made up."""

import logging
import math

import pytest

from specwire.advise.measure import StepRun, hidden_drafts, step_points
from specwire.bench.record import RequestRecord
from specwire.errors import SpecwireError
from specwire.messages import CoordinatorStatus, DraftReport, SettingStatus, SpecStats


def record(gap_s: float, *, drafts: int = 0, num_chunks: int = 11, start_s: float = 0.0, joined: int = 1) -> RequestRecord:
    """A request with a chunk every gap_s, the first at start_s; each verified so many drafts, and `joined` steps came as one chunk."""
    num_steps = 1 + (num_chunks - 1) * joined
    one = RequestRecord(0, 20, 0.0, 0.0, ended_s=start_s + num_chunks * gap_s)
    one.chunk_times_s = [start_s + index * gap_s for index in range(num_chunks)]
    one.chunk_sizes = [1] + [joined] * (num_chunks - 1)
    num_drafts = num_steps - 1 if drafts else 0
    one.spec = SpecStats(num_drafts, num_drafts * drafts, 0, num_steps=num_steps)
    one.drafts = DraftReport([drafts] * num_drafts, [0] * num_drafts, [0.5] * num_drafts * drafts)
    return one


def test_a_step_is_the_gap_between_chunks() -> None:
    [point] = step_points([StepRun(0, 2, 0, [record(0.01), record(0.01)])], 1)
    assert (point.num_sequences, point.num_requested, point.share, point.num_drafts, point.context_len) == (2, 0, 0.0, 0.0, 26)
    assert point.step_ms == pytest.approx(10.0)
    assert point.spread == 0.0


def test_steps_that_came_as_one_chunk_count_each() -> None:
    [point] = step_points([StepRun(0, 1, 0, [record(0.03, joined=3)])], 1)
    assert point.step_ms == pytest.approx(10.0)


def test_only_steps_of_full_batches_count() -> None:
    """The second request comes late and is slower: what the first one did alone, and how it waited for the other's prompt, is left out."""
    early = record(0.001, num_chunks=30)
    early.chunk_times_s = [0.001 * index for index in range(10)] + [0.5 + 0.02 * index for index in range(20)]
    late = record(0.02, num_chunks=15, start_s=0.5)
    [point] = step_points([StepRun(0, 2, 0, [early, late])], 1)
    assert point.step_ms == pytest.approx(20.0)


def test_a_hiccup_does_not_count() -> None:
    one = record(0.01, num_chunks=40)
    one.chunk_times_s = [time_s + (5.0 if index > 20 else 0.0) for index, time_s in enumerate(one.chunk_times_s)]
    [point] = step_points([StepRun(0, 1, 0, [one])], 1)
    assert point.step_ms == pytest.approx(10.0)


def test_drafts_are_compared_with_the_runs_beside_them() -> None:
    """The machine gets three times slower in the second of three repeats; drafts always cost half of a step more."""
    runs = []
    for repeat, pace in enumerate((1.0, 3.0, 1.1)):
        runs += [StepRun(repeat, 4, 0, [record(0.01 * pace)] * 4), StepRun(repeat, 4, 5, [record(0.015 * pace, drafts=5)] * 4)]
    plain, drafted = step_points(runs, 1)
    assert plain.step_ms == pytest.approx(11.0)
    assert plain.spread == pytest.approx(20.0 / 11.0)
    assert (drafted.num_requested, drafted.share, drafted.num_drafts) == (5, 1.0, 5.0)
    assert drafted.step_ms == pytest.approx(16.5)
    assert drafted.spread == pytest.approx(0.0, abs=1e-9)


def test_lanes_share_the_requests() -> None:
    [point] = step_points([StepRun(0, 6, 0, [record(0.01)] * 6)], 3)
    assert point.num_sequences == 2


def test_fewer_drafts_than_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    runs = [StepRun(0, 2, 0, [record(0.01)] * 2), StepRun(0, 2, 5, [record(0.01, drafts=2)] * 2), StepRun(0, 2, 1, [record(0.01)] * 2)]
    with caplog.at_level(logging.WARNING):
        points = step_points([*runs, *(StepRun(1, run.concurrency, run.num_requested, run.records) for run in runs)], 1)
    assert [point.num_requested for point in points] == [0, 2]
    assert [line.getMessage().partition(";")[0] for line in caplog.records] == [
        "with 2 requests at once and 5 drafts asked for, steps verified 2 at most",
        "with 2 requests at once and 1 drafts asked for, steps verified 0 at most",
    ]


@pytest.mark.parametrize(
    ("adaptive", "schedule", "words"),
    [("false", "[[1, 16, 5]]", []), ("true", "[[1, 16, 5]]", ["adaptively"]), ("false", "[[1, 8, 5], [9, 16, 0]]", ["schedule by batch size"])],
)
def test_a_stack_that_hides_drafts(adaptive: str, schedule: str, words: list[str]) -> None:
    settings = SettingStatus("enable_adaptive_verification", adaptive), SettingStatus("num_speculative_tokens_per_batch_size", schedule)
    found = hidden_drafts(CoordinatorStatus("1", 0.0, True, speculation=settings))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
    assert hidden_drafts(CoordinatorStatus("1", 0.0, True)) == []


def test_failures_are_named() -> None:
    failed = RequestRecord(1, 20, 0.0, 0.0, ended_s=math.nan, error="UnavailableError", error_text="gone")
    with pytest.raises(SpecwireError, match=r"1 of 2 requests .*UnavailableError: gone"):
        step_points([StepRun(0, 2, 0, [record(0.01), failed])], 1)


def test_answers_in_one_chunk_need_more_tokens() -> None:
    with pytest.raises(SpecwireError, match=r"1 of 2 requests .* one chunk only.*; give a longer --step-len"):
        step_points([StepRun(0, 2, 0, [record(0.01), record(0.01, num_chunks=1)])], 1)
