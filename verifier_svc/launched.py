"""A round between its launch and its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.messages import RowStatus, VerifyRound, VerifyRowResult

from .executor import PendingRound
from .plan import Segment
from .slots import Slot


@dataclass(frozen=True, slots=True)
class Unrun:
    """A row that the model need not see. What it answers, apart from its status, is known once the rounds before it are read."""

    slot: Slot
    status: RowStatus


@dataclass(slots=True, eq=False)
class LaunchedRound:
    """What was planned for each row; from the launch on under way, then read.

    Args:
        request: the round.
        planned: one a row; an answer itself if it names no open slot.
        segments: those of them that run, in order.
        pending: None if no row runs.
        num_padded_tokens: through the model, with padding.
        opened: tokens in the prefix cache, of each Open.
        rows: the answers, once it is read.
        error: why it has none.
    """

    request: VerifyRound
    planned: Sequence[Segment | Unrun | VerifyRowResult]
    segments: Sequence[Segment]
    pending: PendingRound | None
    num_padded_tokens: int
    opened: list[int]
    rows: list[VerifyRowResult] | None = None
    error: Exception | None = None

    @property
    def is_read(self) -> bool:
        return self.rows is not None or self.error is not None

    def is_done(self) -> bool:
        """Whether reading it has nothing to wait for, apart from the rounds before it."""
        return self.pending is None or self.pending.is_done()

    def wait(self) -> None:
        """Returns once it is done. Any thread may call it, at any time."""
        if self.pending is not None:
            self.pending.wait()
