"""A service that is only healthy: it parses the real flags, answers health checks and writes down what happens to it.

Environment: FAKE_EVENTS is a file that takes a line per event; FAKE_<KIND>, a JSON object, makes it misbehave:
{"status": 3, "line": "..."} ends at the start, {"ready": false} is never healthy, {"deaf": true} ignores SIGTERM.
"""

import asyncio
import json
import os
import signal
import sys

from specwire import rpc
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig, parse_flags

KINDS = {"verifier": VerifierConfig, "drafter": DrafterConfig, "coordinator": CoordinatorConfig}


def note(kind: str, event: str) -> None:
    with open(os.environ["FAKE_EVENTS"], "a", encoding="utf-8") as events:
        events.write(f"{event} {kind} {os.getpid()}\n")


async def serve(kind: str, arguments: list[str]) -> None:
    config = parse_flags(KINDS[kind], kind, arguments)
    behaviour = json.loads(os.environ.get(f"FAKE_{kind.upper()}", "{}"))
    note(kind, "start")
    if "status" in behaviour:
        sys.stderr.write(f"{behaviour['line']}\n")
        sys.exit(behaviour["status"])
    server = rpc.Server(config.listen, [], lambda server: None)
    await server.start()
    await server.set_serving(behaviour.get("ready", True))
    if behaviour.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stderr.write(f"ready: {kind} {' '.join(server.bound_addresses)} {' '.join(arguments)}\n")
    if behaviour.get("deaf"):
        await asyncio.Event().wait()
    await rpc.wait_for_stop_signal()
    note(kind, "stop")
    await server.stop(grace_s=0.5)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))
