"""One module a command: its arguments, and what it calls. It imports what it needs when it runs, so that `--help` is quick.

Importing them registers them; the help lists them in this order.
"""

from specwire.cli.commands import up, services, config, generate, chat, batch, status, bench, advise, trace, health, keys  # isort: skip

__all__ = ["advise", "batch", "bench", "chat", "config", "generate", "health", "keys", "services", "status", "trace", "up"]
