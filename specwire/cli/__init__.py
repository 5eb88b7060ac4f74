"""The command line: `specwire COMMAND`."""

from specwire.cli.interrupts import quiet_interrupts

with quiet_interrupts():  # it takes a second
    from specwire.cli import commands
    from specwire.cli.app import app, main

__all__ = ["app", "commands", "main"]
