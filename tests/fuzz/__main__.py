"""`python -m tests.fuzz --minutes N`: all targets in turn, with other conversations in every round, until the time is over."""

import argparse
import logging
import random
import sys
import time

from specwire.process import set_model_environment
from tests.fuzz.run import TARGETS, fuzz

logger = logging.getLogger(__name__)


def main() -> None:
    """Entry point. Status 1 if there was a fault; the log has the conversation."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--examples", type=int, default=200, help="conversations of a target before the next one's turn")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="default: all")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("coordinator", "drafter_svc", "verifier_svc"):
        logging.getLogger(name).setLevel(logging.ERROR)
    set_model_environment()
    names = options.target or list(TARGETS)
    end, number, num_faults, num_sent = time.monotonic() + 60 * options.minutes, options.seed, 0, 0
    while time.monotonic() < end:
        name = names[(number - options.seed) % len(names)]
        started = time.monotonic()
        try:
            fuzz(name, options.examples, number)
        except Exception:
            num_faults += 1
            logger.exception("%s, seed %d: a fault", name, number)
        num_sent += options.examples
        logger.info(
            "%s, seed %d: %d conversations in %.1f s; %d faults so far", name, number, options.examples, time.monotonic() - started, num_faults
        )
        number += 1
    logger.info("%d conversations, %d faults", num_sent, num_faults)
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
