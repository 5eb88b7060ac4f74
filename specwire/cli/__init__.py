"""The command line: `specwire COMMAND`."""

import specwire.fork_environment  # noqa: F401  (before gRPC)

# isort: split
from specwire.cli.interrupts import quiet_interrupts

with quiet_interrupts():  # it takes a second
    from specwire.cli import commands
    from specwire.cli.app import app, main

__all__ = ["app", "commands", "main"]
