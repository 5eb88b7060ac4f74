"""`python -m specwire.http --flag value`: the HTTP service, in one process or several."""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import sys

from specwire.arguments import parse_flags
from specwire.config import HttpConfig
from specwire.http.board import Board
from specwire.http.group import serve_group
from specwire.http.metrics import LAYOUT
from specwire.http.worker import serve
from specwire.process import run_service


def main() -> None:
    """Entry point."""
    config = parse_flags(HttpConfig, "python -m specwire.http", sys.argv[1:])
    run_service("http", lambda: serve_group(config) if config.processes > 1 else serve(config, Board(LAYOUT)))


if __name__ == "__main__":
    main()
