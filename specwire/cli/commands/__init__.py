"""One module a command: its arguments, and what it calls. It imports what it needs when it runs, so that `--help` is quick.

Importing them registers them; the help lists them in this order.
"""

from specwire.cli.commands import up, services, http, config, generate, chat, batch, status, bench, sweep, advise, train, trace, health, keys  # isort: skip
from specwire.cli.commands import canary  # isort: skip

__all__ = [
    "advise", "batch", "bench", "canary", "chat", "config", "generate", "health", "http", "keys", "services", "status", "sweep", "trace", "train",
    "up",
]  # fmt: skip
