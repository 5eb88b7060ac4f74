"""What gRPC reads of the environment when it is imported: each service's `__main__` imports this module before anything else."""

import os

import specwire.fork_environment  # noqa: F401  (before gRPC)

VARIABLES = (("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener"),)
"""Defaults. gRPC's older event loop: the thread that hands events to Python polls itself, where the newer one puts a thread of its own before it. A
message and its answer between two services take a fifth less (docs/performance.md)."""

for name, value in VARIABLES:
    os.environ.setdefault(name, value)
