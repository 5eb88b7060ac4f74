"""Adaptive verification with ngram over real texts, chat and copy-heavy: beside plain decoding and every fixed K, with tables that are right and
tables that are not."""

import pytest

from tests.policy.text_lane import K_MAX, Curve, TextLane, read_texts

CURVES: dict[str, Curve] = {
    "int4": lambda n: 4.6 + 0.48 * n,
    "bf16": lambda n: 12.0 + 1.3 * n,
    "flat": lambda n: 20.0 + 0.05 * n,
    "steps": lambda n: 5.0 + 3.0 * ((n - 1) // 4),
    "busy": lambda n: 16.0 + 2.6 * n,
    "cheap": lambda n: 5.0 + 0.05 * n,
}


def beside(kind: str, num_at_once: int, table: str, true: str, num_texts: int = 0) -> tuple[float, float]:
    """Throughput beside none, and beside the best of none and some fixed K, behind a window to learn from."""
    texts, lane = read_texts(kind), TextLane(CURVES[true], CURVES[table])
    number = num_texts or 6 * num_at_once
    fixed = [lane.throughput(texts, num_at_once, number, k) for k in (0, 1, 3, 5, K_MAX)]
    lane.throughput(texts, num_at_once, number, None)
    reached = lane.throughput(texts, num_at_once, number, None)
    return reached / fixed[0], reached / max(fixed)


@pytest.mark.parametrize(
    ("kind", "num_at_once", "table", "true"),
    [
        ("chat", 1, "int4", "int4"),
        ("chat", 4, "bf16", "bf16"),
        ("chat", 4, "flat", "flat"),
        ("copy", 4, "steps", "steps"),
        ("copy", 4, "int4", "int4"),
        ("copy", 8, "cheap", "bf16"),
        ("copy", 16, "bf16", "bf16"),
        ("copy", 16, "int4", "int4"),
        ("chat", 4, "busy", "int4"),
        ("copy", 4, "int4", "flat"),
    ],
)
def test_drafts_never_cost_much_whatever_the_table_says(kind: str, num_at_once: int, table: str, true: str) -> None:
    beside_none, beside_best = beside(kind, num_at_once, table, true, num_texts={1: 16, 16: 32}.get(num_at_once, 0))
    assert beside_none >= 0.96
    assert beside_best >= 0.96


@pytest.mark.parametrize(("table", "true", "gain"), [("int4", "int4", 1.2), ("busy", "int4", 1.2), ("bf16", "bf16", 1.38), ("int4", "flat", 1.7)])
def test_one_sequence_of_copied_text_gains_what_the_best_fixed_k_gains(table: str, true: str, gain: float) -> None:
    beside_none, beside_best = beside("copy", 1, table, true, num_texts=16)
    assert beside_none >= gain
    assert beside_best >= 0.98


def test_what_no_part_shows_of_steps_with_drafts() -> None:
    """Sixteen copied texts, for which drafts would hardly pay if nothing but parts took time."""
    texts, lane = read_texts("copy"), TextLane(CURVES["bf16"], CURVES["bf16"], overhead=0.2)
    none = lane.throughput(texts, 16, 32, 0)
    lane.throughput(texts, 16, 32, None)
    assert lane.throughput(texts, 16, 32, None) >= 0.97 * none
