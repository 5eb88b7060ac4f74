"""The command line: `specwire COMMAND`."""

from specwire.cli import commands
from specwire.cli.app import app, main

__all__ = ["app", "commands", "main"]
