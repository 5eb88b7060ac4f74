"""Logging of a service process: stderr, one line a record, with time and service name."""

import logging
import sys


def set_up_logging(service: str, level: int = logging.INFO) -> None:
    """Configures this process's root logger; called once, by `run_service`. The service's name is in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {service} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request to the hub
