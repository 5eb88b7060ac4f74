"""Finds answers that end in a loop: a small model repeats itself, and what a head learns from that is of no use."""

import numpy as np

MAX_PERIOD = 64
_MIN_REPEATED = 16
"""Tokens that must repeat what is a period before them; a loop of a long period must repeat a whole one twice."""


def length_without_loop(tokens: np.ndarray, max_period: int = MAX_PERIOD) -> int:
    """How many tokens are left if the loop at the end is cut after its second round; all of them if there is none."""
    length = len(tokens)
    best = length
    for period in range(1, min(max_period, length // 2) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        start = int(differs[-1]) + 1 if len(differs) else 0  # of the part that has this period
        if length - start - period >= max(2 * period, _MIN_REPEATED):
            best = min(best, start + 2 * period)
    return best
