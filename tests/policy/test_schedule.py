"""Dynamic K: validation, the dense table, and what is said about entries that do not take effect as written."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.errors import InvalidArgumentError
from specwire.policy.schedule import SteadySchedule, dense_schedule, describe_clipping, describe_gaps, schedule_ranges, validate_schedule

NAME = "num_speculative_tokens_per_batch_size"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (None, "is None, but must be a non-empty list"),
        ([], "is [], but must be a non-empty list"),
        ((), "is (), but must be a non-empty list"),
        ({1: 16}, "is {1: 16}, but must be a non-empty list"),
        ("[[1, 16, 3]]", "but must be a non-empty list"),
        (7, "is 7, but must be a non-empty list"),
        ([None], "holds None, but every entry must be 3 integers"),
        ([[1, 16, 3], [32, 64]], "holds [32, 64], but every entry must be 3 integers"),
        ([[1, 16, 3, 4]], "holds [1, 16, 3, 4], but every entry must be 3 integers"),
        (["123"], "holds '123', but every entry must be 3 integers"),
        ([[1, 2, "2"]], "start, end and K must be integers"),
        ([[1, 2, 2.9]], "start, end and K must be integers"),
        ([[1, 2, 2.0]], "start, end and K must be integers"),
        ([[1, 2, True]], "start, end and K must be integers"),
        ([[True, 2, 2]], "start, end and K must be integers"),
        ([[1, None, 2]], "start, end and K must be integers"),
        ([[0, 16, 3]], "whose start is 0, but batch sizes start at 1"),
        ([[-4, -1, 3]], "whose start is -4, but batch sizes start at 1"),
        ([[1, 0, 3]], "whose start 1 is past its end 0"),
        ([[1, 16, 3], [20, 17, 2]], "whose start 20 is past its end 17"),
        ([[1, 16, -1]], "whose K is -1, but K must be 0 or more"),
        ([[1, 16, 3], [16, 32, 2]], "has the ranges 1-16 and 16-32, which overlap"),
        ([[17, 32, 2], [1, 20, 3]], "has the ranges 1-20 and 17-32, which overlap"),
        ([[1, 64, 3], [8, 9, 2]], "has the ranges 1-64 and 8-9, which overlap"),
        ([[1, 4, 3], [1, 4, 3]], "has the ranges 1-4 and 1-4, which overlap"),
        ([[2, 16, 3]], "starts at batch size 2, but the first range must start at 1"),
    ],
)
def test_bad_schedules_are_refused_by_name(schedule: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)) as caught:
        validate_schedule(schedule)  # type: ignore[arg-type]
    assert NAME in str(caught.value)


def test_dense_table_validates() -> None:
    with pytest.raises(ValueError, match=NAME):
        dense_schedule([[2, 16, 3]], 3, 256)


def test_unsorted_entries_are_sorted() -> None:
    assert validate_schedule([[5, 6, 1], [1, 2, 3]]) == [(1, 2, 3), (5, 6, 1)]
    assert validate_schedule(((1, 2, 3),)) == [(1, 2, 3)]


@pytest.mark.parametrize(
    ("schedule", "max_num_seqs", "table"),
    [
        ([[1, 2, 3], [5, 6, 1]], 8, [0, 3, 3, 3, 3, 1, 1, 1, 1]),
        ([[5, 6, 1], [1, 2, 3]], 8, [0, 3, 3, 3, 3, 1, 1, 1, 1]),
        ([[1, 4, 0]], 4, [0, 0, 0, 0, 0]),
        ([[1, 100, 2]], 4, [0, 2, 2, 2, 2]),
        ([[1, 2, 5], [3, 9, 4]], 6, [0, 3, 3, 3, 3, 3, 3]),
        ([[1, 1, 2], [9, 9, 1]], 3, [0, 2, 2, 2]),
        (None, 3, [0, 3, 3, 3]),
    ],
)
def test_dense_table(schedule: list[list[int]] | None, max_num_seqs: int, table: list[int]) -> None:
    assert dense_schedule(schedule, 3, max_num_seqs) == table


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([(1, 16, 3), (32, 128, 2), (256, 2048, 0)], {0: 0, 1: 3, 16: 3, 17: 3, 31: 3, 32: 2, 128: 2, 129: 2, 255: 2, 256: 0}),
        ([(1, 16, 3), (64, 128, 2), (256, 4096, 0)], {4: 3, 64: 2, 256: 0}),
        ([(1, 256, 4)], {1: 3, 256: 3}),
        ([(1, 256, 5)], {16: 3}),
    ],
)
def test_dense_table_of_large_batches(schedule: list[tuple[int, int, int]], expected: dict[int, int]) -> None:
    table = dense_schedule(schedule, 3, 256)
    assert {batch_size: table[batch_size] for batch_size in expected} == expected
    assert len(table) == 257, "a batch larger than max_num_seqs must not find a K"


@pytest.mark.parametrize(("num_tokens", "max_num_seqs", "message"), [(3, 0, "max_num_seqs is 0"), (-1, 4, "num_speculative_tokens is -1")])
def test_limits_of_the_table(num_tokens: int, max_num_seqs: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        dense_schedule([[1, 4, 3]], num_tokens, max_num_seqs)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Valid schedules with gaps, in any order."""
    entries, start = [], 1
    for _ in range(draw(st.integers(1, 5))):
        end = start + draw(st.integers(0, 9))
        entries.append((start, end, draw(st.integers(0, 9))))
        start = end + 1 + draw(st.integers(0, 4))
    return draw(st.permutations(entries))


@given(schedules(), st.integers(1, 7), st.integers(1, 80))
def test_table_follows_its_definition(schedule: list[tuple[int, int, int]], num_tokens: int, max_num_seqs: int) -> None:
    table = dense_schedule(schedule, num_tokens, max_num_seqs)
    assert len(table) == max_num_seqs + 1
    assert table[0] == 0
    for batch_size in range(1, max_num_seqs + 1):
        start, _, wanted = max(entry for entry in schedule if entry[0] <= batch_size)
        assert table[batch_size] == min(wanted, num_tokens), (batch_size, start)
    ranges = schedule_ranges(table)
    assert [value for start, end, value in ranges for _ in range(start, end + 1)] == table[1:]
    assert all(left[1] + 1 == right[0] and left[2] != right[2] for left, right in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("schedule", "reasons"),
    [
        (None, []),
        ([[1, 16, 3]], []),
        ([[1, 8, 3]], []),
        ([[1, 16, 4]], ["[1, 16, 4]: K clipped to num_speculative_tokens = 3"]),
        ([[1, 17, 3]], ["[1, 17, 3]: end cut to max_num_seqs = 16"]),
        ([[17, 20, 9], [1, 16, 3]], ["[17, 20, 9]: unused, since max_num_seqs is 16"]),
        ([[1, 99, 9]], ["[1, 99, 9]: K clipped to num_speculative_tokens = 3", "[1, 99, 9]: end cut to max_num_seqs = 16"]),
    ],
)
def test_clipping_is_explained(schedule: list[list[int]] | None, reasons: list[str]) -> None:
    assert describe_clipping(schedule, 3, 16) == reasons


@pytest.mark.parametrize(
    ("schedule", "reasons"),
    [
        (None, []),
        ([[1, 16, 3]], []),
        ([[1, 99, 3]], []),
        ([[1, 8, 3], [9, 16, 1]], []),
        ([[1, 8, 3]], ["9 to 16 sequences: in no entry, so that K of [1, 8, 3] goes on"]),
        ([[10, 20, 1], [1, 8, 3]], ["9 sequences: in no entry, so that K of [1, 8, 3] goes on"]),
        ([[1, 8, 3], [20, 30, 1]], ["9 to 16 sequences: in no entry, so that K of [1, 8, 3] goes on"]),
        ([[1, 8, 3], [20, 30, 1], [40, 50, 0]], ["9 to 16 sequences: in no entry, so that K of [1, 8, 3] goes on"]),
    ],
)
def test_gaps_are_explained(schedule: list[list[int]] | None, reasons: list[str]) -> None:
    assert describe_gaps(schedule, 16) == reasons


def steps(batch_sizes: list[int], num_steps: int) -> list[int]:
    schedule = SteadySchedule(dense_schedule([[1, 4, 2], [5, 16, 0]], 3, 16), num_steps)
    return [schedule.choose(size, step) for step, size in enumerate(batch_sizes)]


@pytest.mark.parametrize(
    ("batch_sizes", "num_steps", "expected"),
    [
        ([4, 5, 4, 5, 4, 5], 0, [2, 0, 2, 0, 2, 0]),  # off: the table, step by step
        ([4, 5] * 20, 1, [2] * 40),  # a prefill that ends every other step beside four decodes
        ([5, 4] * 20, 1, [0] * 40),
        ([4, 5, 5, 5, 5], 2, [2, 2, 2, 0, 0]),
        ([4, 5, 16, 9, 4, 4, 4, 4], 2, [2, 2, 2, 0, 0, 0, 2, 2]),
        ([4, 5, 5, 4, 5, 5, 4], 2, [2] * 7),  # in a row
        ([16], 9, [0]),  # the first step has nothing to keep
    ],
)
def test_k_changes_once_the_table_has_said_so_for_some_steps(batch_sizes: list[int], num_steps: int, expected: list[int]) -> None:
    assert steps(batch_sizes, num_steps) == expected


def test_plans_that_come_to_nothing_do_not_count() -> None:
    schedule = SteadySchedule(dense_schedule([[1, 4, 2], [5, 16, 0]], 3, 16), 2)
    assert [schedule.choose(size, step) for size, step in ((4, 7), (5, 8), (5, 8), (5, 8), (5, 9), (5, 9), (5, 10))] == [2] * 6 + [0]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(0, 5))
def test_a_steady_k_is_the_tables_within_its_steps(batch_sizes: list[int], num_steps: int) -> None:
    table = dense_schedule([[1, 4, 2], [5, 16, 0]], 3, 16)
    chosen = steps(batch_sizes, num_steps)
    for index, k in enumerate(chosen):
        recent = [table[size] for size in batch_sizes[max(0, index - num_steps) : index + 1]]
        assert k in (recent[-1], chosen[index - 1])
        if len(recent) == num_steps + 1 and len(set(recent)) == 1:
            assert k == recent[0]
