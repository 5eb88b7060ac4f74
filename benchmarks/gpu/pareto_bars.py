"""What `pareto` has to show, and whether its figures do."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
MAX_PREDICTION_ERROR = 0.05
MIN_X_NONE = 0.98


class Bar(NamedTuple):
    """A ratio of throughputs of the adaptive policy.

    Args:
        beside: `none`, or `fixed`: the best fixed K.
        counts: numbers of sequences for which it holds: from, to.
    """

    beside: str
    least: float
    counts: tuple[int, int]


_ALL = (1, 256)
_NEVER_A_LOSS = Bar("none", MIN_X_NONE, _ALL)
BARS: dict[str, tuple[Bar, ...]] = {
    "block-uniform": (Bar("fixed", 0.98, _ALL), Bar("none", 2.0, (1, 16)), _NEVER_A_LOSS),
    "block-mixed": (Bar("fixed", 1.15, (64, 256)), _NEVER_A_LOSS),
    "model-uniform": (Bar("fixed", 0.98, _ALL), _NEVER_A_LOSS),
    "model-mixed": (Bar("fixed", 1.0, _ALL), _NEVER_A_LOSS),
}
"""By drafter and mix."""
MAX_ROLLOUT_X_NONE, MAX_ROLLOUT_X_FIXED = 0.85, 1.02
"""Of a rollout's wall time."""


def compares_fixed(name: str, count: int) -> bool:
    """Whether a bar compares with the best fixed K there."""
    return any(bar.beside == "fixed" and bar.counts[0] <= count <= bar.counts[1] for bar in BARS[name])


def evaluate(name: str, rows: Sequence[Row], sigma: float) -> list[dict[str, Any]]:
    """Every bar of a slice: what is asked for, what was found and whether that is enough.

    Args:
        rows: of all policies and numbers of sequences.
        sigma: noise of the confidences that the bars are for.
    """
    found = []
    for count in sorted({row["c"] for row in rows}):
        here = [row for row in rows if row["c"] == count]
        adaptive = next(row for row in here if row["policy"] == "adaptive" and row["sigma"] == sigma)
        for bar in BARS[name]:
            if bar.counts[0] <= count <= bar.counts[1]:
                other = max(
                    (row for row in here if row["policy"].startswith("K=" if bar.beside == "fixed" else "none")), key=lambda row: row["tok_s"]
                )
                value = adaptive["tok_s"] / other["tok_s"]
                text = f"adaptive / {'best fixed K' if bar.beside == 'fixed' else 'none'}"
                found.append(
                    {"bar": text, "c": count, "beside": other["policy"], "aim": f">= {bar.least:g}", "value": value, "is_met": value >= bar.least}
                )
    errors = [row["prediction_error"] for row in rows if row["policy"] == "adaptive" and row["sigma"] == sigma and row["prediction_error"]]
    if errors:
        value = statistics.median(errors)
        found.append(
            {"bar": "median prediction error", "aim": f"<= {MAX_PREDICTION_ERROR:g}", "value": value, "is_met": value <= MAX_PREDICTION_ERROR}
        )
    return found


def evaluate_rollout(seconds: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Both bars of a rollout, from the seconds by policy."""
    fixed = min((name for name in seconds if name.startswith("K=")), key=seconds.__getitem__)
    for beside, most in (("none", MAX_ROLLOUT_X_NONE), (fixed, MAX_ROLLOUT_X_FIXED)):
        value = seconds["adaptive"] / seconds[beside]
        text = f"adaptive's time / {'none' if beside == 'none' else 'best fixed K'}"
        yield {"bar": text, "beside": beside, "aim": f"<= {most:g}", "value": value, "is_met": value <= most}
