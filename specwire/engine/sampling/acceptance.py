"""When a draft is accepted: strict, if it is the target's own token; synthetic, by chance at configured rates (for benchmarks)."""

from collections.abc import Sequence
from itertools import pairwise


def is_accepted(draft_id: int, target_id: int, position: int, conditional: Sequence[float] | None, draw: float) -> bool:
    """Whether the draft at a position (from 0) is accepted, given that those before it were.

    Args:
        target_id: the target's token at the draft's index.
        conditional: None = strict; else rates from `conditional_rates`, 0 behind the last.
        draw: uniform in (0, 1) of the draft's index; only looked at with rates.
    """
    if conditional is None:
        return draft_id == target_id
    return position < len(conditional) and draw < conditional[position]


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """From P(first i drafts accepted), i = 1, 2, ..., to P(draft i accepted | those before it were).

    Args:
        rates: in [0, 1], non-increasing.
    """
    steps = list(pairwise((1.0, *rates)))
    assert all(1.0 >= before >= after >= 0.0 for before, after in steps), f"synthetic rates {rates} are not falling within [0, 1]"
    return tuple(after / before if before > 0.0 else 0.0 for before, after in steps)
