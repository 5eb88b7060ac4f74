"""A verifier whose worker hangs keeps its connection, and even answers pings: only that a round's answer does not come tells."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from specwire.errors import UnavailableError

if TYPE_CHECKING:
    from .slots import Round

_NUM_TIMES = 64
_MANY_TIMES = 20
"""So many times what rounds took lately, or what the verifier itself measured, is no slow round any more."""
_MOST_S = 86_400.0
"""Between two looks, whatever a verifier says that its rounds take: event loops take no endless delays."""
_DOUBT_S = 1.0
"""A process that was stopped itself finds every round late: answers that are there get this long to be read."""


class AnswerWatch:
    """Says when the oldest round in flight is not answered any more. A step costs it the time of one answer.

    Args:
        timeout_s: what any round may take; 0 = no end.
        in_flight: rounds that are not answered, oldest first.
        on_silence: called with the error that the verifier is given up with; then the watch has ended.
    """

    def __init__(self, timeout_s: float, in_flight: "deque[Round]", on_silence: Callable[[UnavailableError], None]) -> None:
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._on_silence = on_silence
        self._times_ns: deque[int] = deque(maxlen=_NUM_TIMES)
        self._measured_s = 0.0
        self._answered_ns = 0
        self._doubted: Round | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, measured_ms: float) -> None:
        """A connection begins. measured_ms: what the largest round should take; 0 = not known."""
        self._times_ns.clear()
        self._measured_s, self._answered_ns, self._doubted = measured_ms / 1000, 0, None
        if self._timeout_s:
            self._look_in(self._timeout_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answered(self, sent_ns: int, answered_ns: int) -> None:
        """The oldest round was; time.monotonic_ns()."""
        # While another one was running it only waited.
        self._times_ns.append(answered_ns - max(sent_ns, self._answered_ns))
        self._answered_ns = answered_ns

    def _look(self) -> None:
        limit_s = max(self._timeout_s, _MANY_TIMES * self._measured_s, _MANY_TIMES * max(self._times_ns, default=0) / 1e9)
        if not self._in_flight:
            self._look_in(limit_s)
            return
        oldest = self._in_flight[0]
        waited_s = (time.monotonic_ns() - max(oldest.plan.times.sent_ns, self._answered_ns)) / 1e9
        if waited_s < limit_s:
            self._look_in(limit_s - waited_s)
        elif self._doubted is not oldest:
            self._doubted = oldest
            self._look_in(min(_DOUBT_S, limit_s))
        else:
            self._timer = None
            text = f"round {oldest.number} is not answered after {waited_s:.1f} s, though the connection holds"
            self._on_silence(UnavailableError(f"{text}; it seems to hang, and must be started anew if it does not come back"))

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(seconds, _MOST_S), self._look)
