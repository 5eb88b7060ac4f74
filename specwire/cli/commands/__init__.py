"""One module a command: its arguments, and what it calls. It imports what it needs when it runs, so that `--help` is quick.

Importing them registers them; the help lists them in this order.
"""

from specwire.cli.commands import up, generate, bench, trace, health  # isort: skip

__all__ = ["bench", "generate", "health", "trace", "up"]
