"""What gRPC reads of the environment when it is imported, in processes that start others: imported before it."""

import os

VARIABLE = ("GRPC_ENABLE_FORK_SUPPORT", "0")
"""A default. uvloop starts processes by fork, and a child in which gRPC's own handlers run beside its live threads may end with SIGABRT or SIGSEGV
before it is another program: three in a hundred did, and once the parent. Nothing here forks to go on with gRPC in the child; asyncio's own loop does
not fork at all."""

os.environ.setdefault(*VARIABLE)
