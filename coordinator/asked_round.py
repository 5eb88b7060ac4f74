"""The round that a drafter was asked for last: who waits for the answer, and until when."""

import asyncio
import time
from collections.abc import Callable

from .countdown import Countdown

HUNG_S = 1.0
"""A drafter that is this late loses its sequences to another one."""


class AskedRound:
    """One after the other.

    Args:
        on_late: called when the step is about to go on without the answer.
        on_silence: called when there is none HUNG_S later either.

    Attributes:
        number: 0 = it is answered, or nothing was asked yet.
        num_draft_tokens, num_sequences: most drafts of a row, and rows.
        sent_ns: time.monotonic_ns().
        wait_s: how long the step waits.
    """

    def __init__(self, on_late: Callable[[], None], on_silence: Callable[[], None]) -> None:
        self.number = 0
        self.num_draft_tokens = self.num_sequences = 0
        self.sent_ns = 0
        self.wait_s = 0.0
        self._on_late = on_late
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None
        self._countdown: Countdown | None = None
        self._last_countdown: Countdown | None = None

    def begin(self, number: int, num_draft_tokens: int, num_sequences: int, wait_s: float, countdown: Countdown) -> None:
        """It was sent."""
        self.number, self.num_draft_tokens, self.num_sequences, self.wait_s = number, num_draft_tokens, num_sequences, wait_s
        self.sent_ns = time.monotonic_ns()  # the loop's own time may be milliseconds old
        self._countdown = self._last_countdown = countdown
        countdown.add()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._miss)

    def end(self) -> None:
        """It is answered, or will never be."""
        self.number = 0
        self.release()

    def release(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._countdown is not None:
            self._countdown.done()
            self._countdown = None

    def says_speed(self, reply_s: float) -> bool:
        """Not if the drafter hung: what it is waited for would grow to the length of its naps."""
        return reply_s < self.wait_s + HUNG_S

    async def let_step_go_on(self) -> None:
        """The step that waits for drafts takes them out of their slots before these close."""
        if self._last_countdown is not None:
            await self._last_countdown.wait()
            await asyncio.sleep(0)  # the step was woken first

    def _miss(self) -> None:
        self._on_late()
        self.release()
        self._timer = asyncio.get_running_loop().call_later(HUNG_S, self._on_silence)
