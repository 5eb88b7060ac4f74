"""`python -m tests.scripted.faulty ADDRESS FAULT,... [name=value ...]`: a scripted drafter that goes wrong at each SIGUSR1, in each way in turn.

Ways: delay (an answer comes 5 s late), internal (three rounds end their streams with INTERNAL), and the kinds of `tests.scripted.drafter.GARBAGE`
(five answers with such rows); wrong stands for all of these. Every fault is one line in the log as it begins.
"""

import ast
import asyncio
import itertools
import logging
import signal
import sys
from typing import Any

from specwire.errors import InternalError
from specwire.messages import DraftResult, DraftRound
from specwire.process import run_service
from specwire.rpc import wait_for_stop_signal
from tests.scripted.drafter import GARBAGE, DrafterScript, DraftSession, ScriptedDrafter
from tests.scripted.scripts import byte_drafter_script
from tests.scripted.services import ScriptedService

logger = logging.getLogger(__name__)

DELAY_S = 5.0
_NUM_ROUNDS = {"delay": 1, "internal": 3}
_NUM_WRONG_ANSWERS = 5


class FaultyDrafter(ScriptedDrafter):
    """Does what its script says but for the next rounds with rows after each `strike`."""

    def __init__(self, script: DrafterScript, faults: tuple[str, ...], delay_s: float = DELAY_S) -> None:
        super().__init__(script)
        script.delay_s = self._delay
        self._delay_s = delay_s
        self._faults = itertools.cycle(fault for named in faults for fault in (GARBAGE if named == "wrong" else (named,)))
        self._fault = ""
        self._num_left = 0

    def strike(self) -> None:
        """Takes the next fault."""
        self._fault = next(self._faults)
        self._num_left = _NUM_ROUNDS.get(self._fault, _NUM_WRONG_ANSWERS)
        logger.info("fault: %s", self._fault)

    def answer(self, session: DraftSession, message: DraftRound) -> DraftResult | None:
        """Raises InternalError, or gives what the script or the fault says."""
        if not message.rows or self._num_left == 0:
            return super().answer(session, message)
        self._num_left -= 1
        if self._fault == "internal":
            raise InternalError("a fault that was asked for")
        self.script.garbage = (self._fault,) if self._fault in GARBAGE else ()
        try:
            return super().answer(session, message)
        finally:
            self.script.garbage = ()

    def _delay(self, message: DraftRound) -> float:
        return self._delay_s if message.rows and self._num_left and self._fault == "delay" else 0.0


async def serve(address: str, faults: tuple[str, ...], changes: dict[str, Any]) -> None:
    """Serves until SIGTERM or SIGINT."""
    delay_s = changes.pop("fault_delay_s", DELAY_S)
    drafter = FaultyDrafter(byte_drafter_script(**changes), faults, delay_s)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, drafter.strike)
    server = ScriptedService(drafter, address)
    logger.info("ready: scripted drafter %s with faults %s", await server.start(), ",".join(faults))
    await wait_for_stop_signal()
    await server.kill()


def main() -> None:
    """Entry point."""
    address, faults, *pairs = sys.argv[1:]
    changes = {name: ast.literal_eval(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    run_service("scripted drafter", lambda: serve(address, tuple(faults.split(",")), changes))


if __name__ == "__main__":
    main()
