"""Grades: one row is graded as many are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specwire.policy.grades import blend_qualities, blend_quality, grade_of, grades_of

ROWS = st.lists(
    st.tuples(st.one_of(st.just(float("nan")), st.floats(0, 1)), st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.0, -1.0]), min_size=4, max_size=4),
              st.integers(1, 4)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(ROWS, st.booleans())
def test_one_by_one_and_together(rows: list[tuple[float, list[float], int]], is_lone: bool) -> None:
    old, survival, asked = (np.array(column) for column in zip(*rows, strict=True))
    together = blend_qualities(old, survival, asked, is_lone=is_lone)
    alone = [blend_quality(*row, is_lone=is_lone) for row in rows]
    np.testing.assert_allclose(together, alone)
    assert grades_of(np.array(alone)).tolist() == [grade_of(quality) for quality in alone]


def test_borders_belong_to_the_better_grade() -> None:
    assert [grade_of(quality) for quality in (0.0, 0.39, 0.4, 0.65, 0.85, 1.0)] == [1, 1, 2, 3, 4, 4]
