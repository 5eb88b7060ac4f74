"""CPU time of a coordinator's step with tracing off, for 1% of the requests and for all of them.

python -m benchmarks.tracing

Scripted drafter and verifier, real gRPC, each service a process of its own, K = 5 drafts a step. A client keeps a number of requests running over one
Session stream; spans go over OTLP to a collector that throws them away. The kinds of runs take turns, in an order that turns round each time; all
requests are traced in the first rounds only.
"""

import argparse
import asyncio
import dataclasses
import logging
import pickle
import random
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.overhead_services import ACCEPTANCE, K, address_of, coordinator_config
from benchmarks.overhead_trace import Received
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire import rpc
from specwire.config import flags
from specwire.launch import ServiceSpec, Supervisor
from specwire.messages import GenerateRequest, SessionStart
from specwire.sampling_params import SamplingParams
from specwire.tracing import format_traceparent
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import generate

MAX_COST_PERCENT = 2.0
"""What is promised of tracing 1% of the requests."""
KINDS = ("off", "1%", "100%")
MAX_FULL_ROUNDS = 3
"""Rounds that trace all requests: that cost is tens of percents, so few runs show it."""
logger = logging.getLogger(__name__)

_PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
_ONE_IN = 100
_FULL_SHARE = 0.9
_WARM_UP_SHARE = 0.25
"""Part of the steps that is left out at the start: the connection to the collector is made there."""
_SESSION = "/specwire.v1.CoordinatorService/Session"
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass(frozen=True, slots=True)
class Run:
    """One coordinator with fresh peers; steps are those in which nearly all requests have a row."""

    cpu_ms: float
    num_steps: int
    num_exports: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--requests", type=int, default=16, help="requests of a run, as a multiple of those that run at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a request")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, in turns")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for tracing.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    results = [asyncio.run(measure(num_seqs, args.requests * num_seqs, args.tokens, args.rounds)) for num_seqs in args.sequences]
    print_table(
        ["sequences", *(f"{kind} ms" for kind in KINDS), "1% costs", "at most", "100% costs", "steps"],
        [
            [
                str(r["sequences"]), *(f"{r['cpu_ms'][kind]:.3f}" for kind in KINDS), f"{r['cost_percent']['1%']:.2f}%", f"{MAX_COST_PERCENT:g}%",
                f"{r['cost_percent']['100%']:.2f}%", str(r["steps"]),
            ]
            for r in results
        ],
    )  # fmt: skip
    figures = {
        "unit": "ms a step: user and system time of the coordinator, all its threads; medians of the rounds",
        "num_speculative_tokens": K, "acceptance": ACCEPTANCE, "tokens_a_request": args.tokens, "rounds": args.rounds,
        "cost_percent_of_1_at_most": MAX_COST_PERCENT, "results": results,
    }  # fmt: skip
    print(f"\nwritten to {write_report('tracing', figures, args.output, bystanders)}")


async def measure(num_seqs: int, num_requests: int, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Everything about one number of sequences. Costs are medians over the rounds of what the round's own run without tracing took."""
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for index in range(num_rounds):
        kinds = KINDS if index < MAX_FULL_ROUNDS else KINDS[:2]
        for kind in kinds if index % 2 == 0 else reversed(kinds):
            runs[kind].append(await run(kind, num_seqs, num_requests, num_tokens))
    costs = {
        kind: [100 * (traced.cpu_ms / off.cpu_ms - 1) for off, traced in zip(runs["off"], runs[kind], strict=False)] for kind in KINDS[1:]
    }  # fmt: skip
    return {
        "sequences": num_seqs,
        "requests": num_requests,
        "steps": runs["off"][-1].num_steps,
        "cpu_ms": {kind: round(statistics.median(run.cpu_ms for run in of_kind), 4) for kind, of_kind in runs.items()},
        "cost_percent": {kind: round(statistics.median(values), 2) for kind, values in costs.items()},
        "cost_percent_standard_error": {
            kind: round(1.25 * statistics.stdev(values) / len(values) ** 0.5, 2) for kind, values in costs.items() if len(values) > 1
        },
        "cost_percent_of_rounds": {kind: [round(value, 2) for value in values] for kind, values in costs.items()},
        "exports": {kind: of_kind[-1].num_exports for kind, of_kind in runs.items()},
    }


async def run(kind: str, num_seqs: int, num_requests: int, num_tokens: int) -> Run:
    """Starts peers and coordinator, lets a client generate, stops everything and reads what the verifier recorded."""
    with tempfile.TemporaryDirectory(prefix="specwire-bench-") as name, _collecting() as (endpoint, exports):
        folder = Path(name)
        config = coordinator_config(folder, num_seqs, K)
        if kind != "off":
            # At 1% the client decides: by the ratio, how many are traced would differ from run to run.
            config = dataclasses.replace(config, trace_endpoint=endpoint, trace_sample_ratio=1.0 if kind == "100%" else 0.0)
        peers = [
            ServiceSpec(peer, "benchmarks.overhead_services", (peer, str(folder), str(num_seqs), str(K)), address_of(folder, peer))
            for peer in ("verifier", "drafter")
        ]
        subject = ServiceSpec("coordinator", "coordinator", tuple(flags(config)), config.listen[0])
        supervisor = Supervisor([peers, [subject]], _log_line, startup_timeout_s=120.0)
        try:
            await supervisor.start()
            (folder / "subject").write_text(str(supervisor.groups[1][0].pid))
            async with rpc.open_channel(config.listen[0]) as channel:
                await _generate(channel, num_seqs, num_requests, num_tokens, sends_contexts=kind == "1%")
        finally:
            await supervisor.stop()
        records: list[Received] = pickle.loads((folder / "verifier.records").read_bytes())
        num_exports = len(exports)
    full = [index for index, record in enumerate(records) if len(record.message.rows) >= _FULL_SHARE * num_seqs]
    first, last = full[round(_WARM_UP_SHARE * len(full))], full[-1]
    num_steps = last - first
    return Run((records[last].cpu_ns - records[first].cpu_ns) / num_steps / 1e6, num_steps, num_exports)


@contextmanager
def _collecting() -> Iterator[tuple[str, list[int]]]:
    """A collector that throws everything away: its address, and the sizes of what it got."""
    sizes: list[int] = []

    def export(request: bytes, _: Any) -> bytes:
        sizes.append(len(request))
        return b""

    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    handlers = {_EXPORT.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_EXPORT.split("/")[1], handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address, sizes
    finally:
        server.stop(None).wait()


async def _generate(channel: Any, num_seqs: int, num_requests: int, num_tokens: int, *, sends_contexts: bool) -> None:
    """Keeps num_seqs requests running until num_requests have ended. The first ones are shorter, so that they don't end together."""
    source = random.Random(1)

    def start(index: int) -> Any:
        traceparent = format_traceparent(source.getrandbits(128) | 1, source.getrandbits(64) | 1) if sends_contexts and index % _ONE_IN == 0 else ""
        length = num_tokens if index >= num_seqs else max(1, num_tokens * (index + 1) // num_seqs)
        params = SamplingParams(max_tokens=length, temperature=1.0, seed=1, ignore_eos=True)
        return generate.pack_start(SessionStart(index + 1, GenerateRequest([*_PROMPT, 13 + index % 900], params, traceparent=traceparent)))

    call = channel.stream_stream(_SESSION, request_serializer=pb.SessionRequest.SerializeToString)()
    num_started, num_done = num_seqs, 0
    await call.write(pb.SessionRequest(starts=[start(index) for index in range(num_seqs)]))
    while num_done < num_requests:
        ended = 0
        for event in pb.SessionResponse.FromString(await call.read()).events:
            assert not event.HasField("error"), event.error
            ended += event.done
        num_done += ended
        num_new = min(ended, num_requests - num_started)
        if num_new:
            await call.write(pb.SessionRequest(starts=[start(num_started + index) for index in range(num_new)]))
            num_started += num_new
    call.cancel()


def _log_line(name: str, line: str) -> None:
    if " INFO " not in line:
        logger.warning("%s: %s", name, line)


if __name__ == "__main__":
    main()
