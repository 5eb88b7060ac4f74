"""What is said while the services start, which can take minutes: in the log, and on standard error where that is a terminal or a notebook."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from rich.console import Console

logger = logging.getLogger(__name__)

_FIRST_NOTICE_S = 10.0
"""Then after twice that time, and so on."""


def wait_with_notices(starting: "Future[None]", describe: Callable[[], str], *, console: Console | None = None) -> None:
    """Returns once all has started, and raises what keeps it from it. A start that takes long says so, and when it is over.

    Args:
        describe: what is waited for now.
    """
    started, notice_s = time.monotonic(), _FIRST_NOTICE_S
    while not wait([starting], timeout=started + notice_s - time.monotonic()).done:
        _say(f"starting for {notice_s:g} s: {describe()}", console)
        notice_s *= 2
    starting.result()
    if notice_s > _FIRST_NOTICE_S:
        _say(f"started in {time.monotonic() - started:.0f} s", console)


def _say(text: str, console: Console | None) -> None:
    logger.info("%s", text)
    console = console or Console(stderr=True)
    if console.is_terminal or console.is_jupyter:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
