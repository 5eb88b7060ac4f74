"""Tokens that a method with KV still has to compute: which it computes with the next drafts, and which between rounds."""

from collections.abc import Iterator, Mapping

from specwire.engine.kv_cache import BLOCK_SIZE

_MAX_INLINE = 2 * BLOCK_SIZE
"""Tokens without KV that a sequence may have and still be drafted for at once; with more it waits for background work. A prompt that the prefix cache
has whole misses up to a block, and then what is committed until the first ask."""
_MAX_INLINE_OF_ALL = 1024
"""The same of all sequences of one call together, counting those that miss more than a step commits: the others wait for their drafts, too."""
_OLDEST_SHARE = 4
"""One part in so many of a background chunk goes to the sequence that waits longest."""


class Backlog:
    """The sequences that wait for background work, in the order in which they began to.

    Args:
        max_step: most tokens that a step commits (K + 1): so many are always computed with the next drafts.
    """

    def __init__(self, max_step: int) -> None:
        self.max_step = max_step
        self._max_inline = max(_MAX_INLINE, max_step)
        self._waiting: dict[int, None] = {}  # an ordered set

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, seq_id: int, num_missing: int) -> None:
        """A sequence misses so many tokens: it waits if they are more than a step commits, also where they could be computed with the first drafts.
        Before those are asked for that delays nobody."""
        if num_missing > self.max_step:
            self._waiting.setdefault(seq_id)

    def discard(self, seq_id: int) -> None:
        """A sequence waits no longer."""
        self._waiting.pop(seq_id, None)

    def is_inline(self, num_missing: int, num_inline: int) -> bool:
        """Whether so many missing tokens of a sequence are computed with its drafts, in a call that computes num_inline such tokens of others."""
        return num_missing <= self.max_step or num_missing <= min(self._max_inline, _MAX_INLINE_OF_ALL - num_inline)


def divide(missing: Mapping[int, int], budget: int) -> dict[int, int]:
    """How many tokens of each sequence a chunk of `budget` computes: a quarter goes to the first one, which waits longest, the rest to those that
    miss least, so that most can be drafted for soon.

    Args:
        missing: tokens that could be computed now, by sequence.
    """
    shares: dict[int, int] = {}
    oldest = next(iter(missing), None)
    if oldest is None:
        return shares
    shares[oldest] = min(missing[oldest], max(1, budget // _OLDEST_SHARE))
    left = budget - shares[oldest]
    for seq_id in sorted(missing, key=missing.__getitem__):
        if not left:
            break
        more = min(missing[seq_id] - shares.get(seq_id, 0), left)
        shares[seq_id] = shares.get(seq_id, 0) + more
        left -= more
    return shares
