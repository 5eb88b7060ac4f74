"""A service that is only healthy: it parses the real flags, answers health and Describe, and writes down what happens to it.

Environment: FAKE_EVENTS is a file that takes a line per event; FAKE_<KIND>, a JSON object, makes it misbehave:
{"status": 3, "line": "..."} ends at the start, {"ready": false} is never healthy, {"deaf": true} ignores SIGTERM.
"""

import asyncio
import json
import os
import signal
import sys

import grpc

from specwire import rpc
from specwire.arguments import parse_flags
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig
from specwire.messages import ServiceDescription
from specwire.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, verifier_pb2, verifier_pb2_grpc
from specwire.wire.describe import pack_description

KINDS = {"verifier": VerifierConfig, "drafter": DrafterConfig, "coordinator": CoordinatorConfig}


def note(kind: str, event: str) -> None:
    with open(os.environ["FAKE_EVENTS"], "a", encoding="utf-8") as events:
        events.write(f"{event} {kind} {os.getpid()}\n")


def register(kind: str, config: VerifierConfig | DrafterConfig | CoordinatorConfig, server: grpc.aio.Server) -> None:
    """Describe, as the real services answer it; holds at most 4 drafts."""

    class Verifier(verifier_pb2_grpc.VerifierServiceServicer):
        async def Describe(self, request: object, context: object) -> verifier_pb2.VerifierServiceDescribeResponse:
            return verifier_pb2.VerifierServiceDescribeResponse(description=description("fake-model"))

    class Drafter(drafter_pb2_grpc.DrafterServiceServicer):
        async def Describe(self, request: object, context: object) -> drafter_pb2.DrafterServiceDescribeResponse:
            return drafter_pb2.DrafterServiceDescribeResponse(description=description("fake-lookup", method="ngram"))

    def description(model_id: str, method: str = "") -> types_pb2.ServiceDescription:
        return pack_description(
            ServiceDescription(
                model_id, "instance", 100, max_model_len=512, max_num_draft_tokens=4, max_num_seqs=config.max_num_seqs, dtype="float32",
                device="cpu", block_size=16, num_blocks=64, max_num_batched_tokens=128, method=method,
            )
        )  # fmt: skip

    if kind == "verifier":
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Verifier(), server)
    elif kind == "drafter":
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(Drafter(), server)


async def serve(kind: str, arguments: list[str]) -> None:
    config = parse_flags(KINDS[kind], kind, arguments)
    behaviour = json.loads(os.environ.get(f"FAKE_{kind.upper()}", "{}"))
    note(kind, "start")
    if "status" in behaviour:
        sys.stderr.write(f"{behaviour['line']}\n")
        sys.exit(behaviour["status"])
    server = rpc.Server(config.listen, [], lambda server: register(kind, config, server))
    await server.start()
    stopping = asyncio.create_task(asyncio.Event().wait() if behaviour.get("deaf") else rpc.wait_for_stop_signal())
    await asyncio.sleep(0)  # it listens to signals from here on
    if behaviour.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await server.set_serving(behaviour.get("ready", True))
    sys.stderr.write(f"ready: {kind} {' '.join(server.bound_addresses)} {' '.join(arguments)}\n")
    await stopping
    note(kind, "stop")
    await server.stop(grace_s=0.5)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))
