"""What keeps a lane going: it connects to the verifier, steps, and connects again after every loss."""

import logging
from collections.abc import Awaitable, Callable

from specwire.errors import InternalError, SpecwireError
from specwire.messages import Hello, ServiceDescription, VerifyRound

from .backoff import Backoff
from .balance import let_go
from .lane import Lane
from .peers import VerifierPeer, answer_in_time, greet

logger = logging.getLogger(__name__)

Accept = Callable[[Lane, VerifierPeer, ServiceDescription], Awaitable[None]]
"""Raises FailedPreconditionError if a verifier that was reached can't be a lane."""


class LaneRunner:
    """Drives one lane.

    Args:
        peer: its verifier, which is closed at the end.
        hello: what a stream begins with.
    """

    def __init__(self, lane: Lane, peer: VerifierPeer, hello: Hello) -> None:
        self._lane = lane
        self._peer = peer
        self._hello = hello
        self._session = 0

    async def run(self, step: Callable[[Lane], Awaitable[None]], accept: Accept) -> None:
        """Connects and steps; cancelled from outside."""
        lane, backoff = self._lane, Backoff()
        try:
            while True:
                try:
                    await self._connect(accept)
                    first_round = lane.next_round
                    while not lane.is_draining or lane.in_flight:
                        if lane.leaving:
                            let_go(lane)
                        await step(lane)
                        if lane.next_round - len(lane.in_flight) > first_round:  # one was answered
                            backoff.reset()
                    lane.hand_over()
                except SpecwireError as error:
                    lane.lose(error)
                except Exception as error:
                    logger.exception("lane %d: a fault in its step", lane.index)
                    lane.lose(InternalError(f"{type(error).__name__}: {error}"))
                await backoff.wait()
        finally:
            lane.hang_up()
            await self._peer.close()

    async def _connect(self, accept: Accept) -> None:
        lane, hello = self._lane, self._hello
        description = await answer_in_time(self._peer.describe(), "Describe")
        lane.expect(description)
        await accept(lane, self._peer, description)
        stream = self._peer.open_stream()
        self._session += 1
        try:
            welcome = await greet(stream, VerifyRound(self._session, lane.index, 0, hello=hello), description.instance_id)
        except BaseException:
            stream.close()
            raise
        max_outstanding_rounds = max(1, min(hello.max_outstanding_rounds, welcome.max_outstanding_rounds))
        lane.begin(self._session, stream, description, welcome, max_outstanding_rounds)
