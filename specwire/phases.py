"""Where the time of a start goes: each phase by name, and all of them in one line."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_LONG_S = 3.0
"""A phase that takes longer gets a line of its own when it ends: what follows may take long, too."""
_SLOW_S = 10.0
"""One that takes longer says so while it runs: nobody should wait without being told for what."""
_COMPILES = "a first start compiles code for this machine, and keeps it"
_SLOW_BECAUSE = {
    "import": "Python reads its libraries, which takes long where the disk is slow or the machine is busy",
    "files": "a first start fetches and converts files, and keeps them",
    "weights": "they are read and brought into their format",
    "capture": _COMPILES,
    "profile": f"the costs of rounds are measured; {_COMPILES}",
}
"""By the name of the phase."""


class Phases:
    """Times phases that follow each other, from its making on.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what is done inside; again under the same name, it adds up."""
        started = self._clock()
        because = f"; {_SLOW_BECAUSE[name]}" if name in _SLOW_BECAUSE else ""
        notice = threading.Timer(_SLOW_S, logger.info, ["%s: not done after %.0f s%s", name, _SLOW_S, because])
        notice.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread is left: no notice then
            notice.start()
        try:
            yield
        finally:
            notice.cancel()
            seconds = self._clock() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if seconds >= _LONG_S:
                logger.info("%s: %.1f s", name, seconds)

    def __str__(self) -> str:
        total = self._clock() - self._started
        parts = {name: seconds for name, seconds in self._seconds.items() if seconds >= 0.05}
        rest = total - sum(parts.values())
        shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in [*parts.items(), ("other", rest)] if seconds >= 0.05)
        return f"{total:.1f} s ({shown})" if shown else f"{total:.1f} s"
