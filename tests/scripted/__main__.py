"""`python -m tests.scripted verifier|drafter ADDRESS [name=value ...]`: one scripted service as a process; values are Python literals."""

import ast
import logging
import sys
from typing import Any

from specwire.process import run_service
from specwire.rpc import wait_for_stop_signal
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier

logger = logging.getLogger(__name__)


async def serve(kind: str, address: str, changes: dict[str, Any]) -> None:
    """Serves until SIGTERM or SIGINT."""
    is_verifier = kind == "verifier"
    service = ScriptedVerifier(byte_verifier_script(**changes)) if is_verifier else ScriptedDrafter(byte_drafter_script(**changes))
    server = ScriptedService(service, address)
    logger.info("ready: scripted %s %s", kind, await server.start())
    await wait_for_stop_signal()
    await server.kill()


def main() -> None:
    """Entry point."""
    kind, address, *pairs = sys.argv[1:]
    changes = {name: ast.literal_eval(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    run_service(f"scripted {kind}", lambda: serve(kind, address, changes))


if __name__ == "__main__":
    main()
