"""CPU time that the coordinator adds to a step, beside an echo of the same messages without logic; and what the hops between services take.

python -m benchmarks.overhead [--adaptive]

Scripted drafter and verifier, real gRPC, each service a process of its own, K = 5 drafts a step, all sequences on one Session stream.
The echo is measured in turns with the coordinator: same peers, same client, the very messages that the coordinator sent.
With --adaptive: what adaptive verification adds to a step of K = 7, in turns with the same coordinator without it.
"""

import argparse
import asyncio
import logging
import pickle
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.overhead_services import ACCEPTANCE, K, address_of, coordinator_config
from benchmarks.overhead_trace import EchoScript, EchoStep, Hop, Received
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire import rpc
from specwire.config import flags
from specwire.launch import ServiceProcess, ServiceSpec, Supervisor
from specwire.messages import DraftRound, GenerateRequest, Hello, SessionStart, VerifyRound
from specwire.sampling_params import SamplingParams
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import draft, generate, verify

MAX_ABOVE_ECHO_MS = {1: 0.4, 256: 2.5}
"""What is promised."""
MAX_ADAPTIVE_MS = {256: 0.3}
"""The same of what adaptive verification adds."""
ADAPTIVE_K = 7
_ROUND_MS = 20.0
"""Of the verifier beside adaptive verification, which drafts only where that pays by the clock."""
logger = logging.getLogger(__name__)

_PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
_NUM_WARM_UP_STEPS = 20
_NUM_SINGLE_REQUESTS = 100
_SESSION = "/specwire.v1.CoordinatorService/Session"


@dataclass(frozen=True, slots=True)
class Run:
    """One process under test with fresh peers; steps are those in which every sequence decodes.

    Args:
        messages: what the client received, with the time.
        singles: start and end of requests of one token each, sent one after the other.
    """

    cpu_ms: float
    step_ms: float
    num_steps: int
    rounds: list[Received]
    draft_rounds: list[Received]
    messages: list[tuple[int, bytes]]
    singles: list[tuple[int, int]]
    hops: dict[str, list[Hop]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=400, help="about how many steps of a run are measured")
    parser.add_argument("--rounds", type=int, default=5, help="runs of coordinator and echo, in turns")
    parser.add_argument("--adaptive", action="store_true", help="measure what adaptive verification adds, and nothing else")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for overhead.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    if args.adaptive:
        report_adaptive([asyncio.run(measure_adaptive(num_seqs, args.steps, args.rounds)) for num_seqs in args.sequences], args.output, bystanders)
        return
    results = [asyncio.run(measure(num_seqs, args.steps, args.rounds)) for num_seqs in args.sequences]
    print_table(
        ["sequences", "coordinator ms", "echo ms", "above echo ms", "at most", "step ms", "echo step ms", "messages a step"],
        [
            [
                str(r["sequences"]), f"{r['coordinator_cpu_ms']:.3f}", f"{r['echo_cpu_ms']:.3f}", f"{r['above_echo_ms']:.3f}",
                str(MAX_ABOVE_ECHO_MS.get(r["sequences"], "")), f"{r['coordinator_step_ms']:.2f}", f"{r['echo_step_ms']:.2f}",
                f"{r['session_messages_per_step']:.2f}",
            ]
            for r in results
        ],
    )  # fmt: skip
    print()
    hops = list(results[0]["hops_ms"])
    print_table(["hop, ms (median, p90)", *(str(r["sequences"]) for r in results)], [
        [hop, *(" ".join(f"{value:.2f}" for value in r["hops_ms"][hop]) for r in results)] for hop in hops
    ])  # fmt: skip
    figures = {
        "unit": "ms a step: user and system time of the process; medians of the rounds",
        "num_speculative_tokens": K, "acceptance": ACCEPTANCE, "rounds": args.rounds, "results": results,
    }  # fmt: skip
    print(f"\nwritten to {write_report('overhead', figures, args.output, bystanders)}")


def report_adaptive(results: list[dict[str, Any]], output: Path, bystanders: Bystanders) -> None:
    print_table(
        ["sequences", "adaptive ms", "fixed K ms", "added ms", "at most", "drafts verified a row"],
        [
            [
                str(r["sequences"]), f"{r['adaptive_cpu_ms']:.3f}", f"{r['fixed_cpu_ms']:.3f}", f"{r['added_ms']:.3f}",
                str(MAX_ADAPTIVE_MS.get(r["sequences"], "")), f"{r['drafts_per_row']:.2f}",
            ]
            for r in results
        ],
    )  # fmt: skip
    figures = {
        "unit": "ms a step: user and system time of the process; medians of the rounds",
        "num_speculative_tokens": ADAPTIVE_K,
        "results": results,
    }
    print(f"\nwritten to {write_report('overhead_adaptive', figures, output, bystanders)}")


async def measure_adaptive(num_seqs: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """What adaptive verification adds at one number of sequences."""
    num_tokens = round(1.25 * num_steps * sum(ACCEPTANCE**i for i in range(ADAPTIVE_K + 1)))
    fixed, adaptive = [], []
    for _ in range(num_rounds):
        fixed.append(await run("coordinator", num_seqs, num_tokens, k=ADAPTIVE_K, has_costs=True, round_ms=_ROUND_MS))
        adaptive.append(await run("coordinator", num_seqs, num_tokens, k=ADAPTIVE_K, has_costs=True, is_adaptive=True, round_ms=_ROUND_MS))
    rows = [row for record in adaptive[-1].rounds for row in record.message.rows if row.base_len]
    added = [one.cpu_ms - other.cpu_ms for one, other in zip(adaptive, fixed, strict=True)]
    return {
        "sequences": num_seqs,
        "adaptive_cpu_ms": _median(run.cpu_ms for run in adaptive),
        "fixed_cpu_ms": _median(run.cpu_ms for run in fixed),
        "added_ms": _median(added),
        "added_ms_of_rounds": [round(value, 4) for value in added],
        "drafts_per_row": round(statistics.mean(len(row.draft_tokens) for row in rows), 3),
    }


async def measure(num_seqs: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Everything about one number of sequences."""
    num_tokens = round(num_steps * sum(ACCEPTANCE**i for i in range(K + 1)) * (1.0 if num_seqs == 1 else 1.25))
    coordinators, echoes = [], []
    for _ in range(num_rounds):
        coordinators.append(await run("coordinator", num_seqs, num_tokens))
        echoes.append(await run("echo", num_seqs, num_tokens, make_script(coordinators[-1])))
    timed = await run("timed-coordinator", num_seqs, num_tokens)
    above = [coordinator.cpu_ms - echo.cpu_ms for coordinator, echo in zip(coordinators, echoes, strict=True)]
    last = coordinators[-1]
    result = {
        "sequences": num_seqs,
        "steps": last.num_steps,
        "coordinator_cpu_ms": _median(run.cpu_ms for run in coordinators),
        "echo_cpu_ms": _median(run.cpu_ms for run in echoes),
        "above_echo_ms": _median(above),
        "above_echo_ms_of_rounds": [round(value, 4) for value in above],
        "coordinator_step_ms": _median(run.step_ms for run in coordinators),
        "echo_step_ms": _median(run.step_ms for run in echoes),
        "session_messages_per_step": round(len(last.messages) / sum(1 for record in last.rounds if record.message.rows), 3),
        "hops_ms": measure_hops(timed, num_seqs),
    }
    if num_seqs in MAX_ABOVE_ECHO_MS:
        result["above_echo_ms_at_most"] = MAX_ABOVE_ECHO_MS[num_seqs]
    return result


async def run(
    kind: str,
    num_seqs: int,
    num_tokens: int,
    script: EchoScript | None = None,
    *,
    k: int = K,
    has_costs: bool = False,
    is_adaptive: bool = False,
    round_ms: float = 0.0,
) -> Run:
    """Starts peers and the process under test, lets a client generate, stops everything and reads what was recorded.

    Args:
        script: of the echo.
        round_ms: what a round of the verifier takes besides its own work.
    """
    with tempfile.TemporaryDirectory(prefix="specwire-bench-") as name:
        folder = Path(name)
        if script is not None:
            (folder / "echo").write_bytes(pickle.dumps(script))
        peers = [_service(name, folder, num_seqs, k, has_costs=has_costs, round_ms=round_ms) for name in ("verifier", "drafter")]
        subject = _service(kind, folder, num_seqs, k) if kind != "coordinator" else ServiceSpec(
            kind, "coordinator", tuple(flags(coordinator_config(folder, num_seqs, k, is_adaptive=is_adaptive))), address_of(folder, "coordinator")
        )  # fmt: skip
        supervisor = Supervisor([peers, [subject]], _log_line, startup_timeout_s=120.0)
        try:
            await supervisor.start()
            (folder / "subject").write_text(str(_process_id(supervisor.groups[1][0])))
            async with rpc.open_channel(address_of(folder, "coordinator")) as channel:
                messages = await _generate(channel, num_seqs, num_tokens)
                singles = [await _time_single(channel) for _ in range(_NUM_SINGLE_REQUESTS)] if kind == "timed-coordinator" else []
        finally:
            await supervisor.stop()
        rounds, draft_rounds = (pickle.loads((folder / f"{peer}.records").read_bytes()) for peer in ("verifier", "drafter"))
        hops = pickle.loads((folder / "coordinator.hops").read_bytes()) if kind == "timed-coordinator" else {}
    decodes = [record for record in rounds if len(record.message.rows) == num_seqs and all(row.base_len for row in record.message.rows)]
    window = decodes[_NUM_WARM_UP_STEPS:]
    num_steps = len(window) - 1
    cpu_ms = (window[-1].cpu_ns - window[0].cpu_ns) / num_steps / 1e6
    step_ms = (window[-1].received_ns - window[0].received_ns) / num_steps / 1e6
    return Run(cpu_ms, step_ms, num_steps, rounds, draft_rounds, messages, singles, hops)


def make_script(recorded: Run) -> EchoScript:
    """Puts the messages of a run into steps by the times at which they came."""
    hello = Hello("echo", 1, 2)
    requests, messages = iter(recorded.draft_rounds), iter(recorded.messages)
    request, message = next(requests, None), next(messages, None)
    steps = []
    ends = [record.received_ns for record in recorded.rounds[1:]] + [1 << 63]
    for record, end_ns in zip(recorded.rounds, ends, strict=True):
        draft_requests: list[DraftRound] = []
        while request is not None and request.received_ns <= record.received_ns:
            draft_requests.append(request.message)
            request = next(requests, None)
        responses = []
        while message is not None and message[0] < end_ns:
            responses.append(message[1])
            message = next(messages, None)
        packed = [draft.pack_round(round_).SerializeToString() for round_ in draft_requests]
        answered = [bool(round_.rows) for round_ in draft_requests]
        steps.append(EchoStep(packed, answered, verify.pack_round(record.message).SerializeToString(), responses))
    draft_hello = draft.pack_round(DraftRound(1, 0, 0, hello=hello)).SerializeToString()
    return EchoScript(draft_hello, verify.pack_round(VerifyRound(1, 0, 0, hello=hello)).SerializeToString(), steps)


def measure_hops(timed: Run, num_seqs: int) -> dict[str, list[float]]:
    """Median and 90th percentile in ms of round trips without what the service took, and of all that is not the verifier's in a request."""
    hops = {}
    for peer in ("drafter", "verifier"):
        steps = [hop for hop in timed.hops[peer] if hop.num_rows == num_seqs][_NUM_WARM_UP_STEPS:]
        hops[f"coordinator -> {peer} and back"] = _quantiles([(hop.round_trip_ns - hop.service_ns) / 1e6 for hop in steps])
    rest = []
    for start_ns, end_ns in timed.singles:
        [inside] = [hop for hop in timed.hops["verifier"] if start_ns <= hop.sent_ns <= end_ns and hop.num_rows]
        rest.append((end_ns - start_ns - inside.round_trip_ns) / 1e6)
    return {"client -> coordinator and back": _quantiles(rest), **hops}


async def _generate(channel: Any, num_seqs: int, num_tokens: int) -> list[tuple[int, bytes]]:
    """Starts all sequences in one message; keeps every message until the last one has ended."""
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=1, ignore_eos=True)
    requests = [GenerateRequest([*_PROMPT, 13 + index], params) for index in range(num_seqs)]
    call = channel.stream_stream(_SESSION, request_serializer=pb.SessionRequest.SerializeToString)()
    await call.write(pb.SessionRequest(starts=[generate.pack_start(SessionStart(index + 1, request)) for index, request in enumerate(requests)]))
    messages, num_done = [], 0
    while num_done < num_seqs:
        data = await call.read()
        messages.append((time.time_ns(), data))
        for event in pb.SessionResponse.FromString(data).events:
            assert not event.HasField("error"), event.error
            num_done += event.done
    call.cancel()
    return messages


async def _time_single(channel: Any) -> tuple[int, int]:
    start_ns = time.time_ns()
    [*_, (end_ns, _)] = await _generate(channel, 1, 1)
    return start_ns, end_ns


def _service(kind: str, folder: Path, num_seqs: int, k: int, *, has_costs: bool = False, round_ms: float = 0.0) -> ServiceSpec:
    name = kind if kind in ("verifier", "drafter") else "coordinator"
    rest = (f"round_ms={round_ms}", *(["costs"] if has_costs else []))
    return ServiceSpec(kind, "benchmarks.overhead_services", (kind, str(folder), str(num_seqs), str(k), *rest), address_of(folder, name))


def _process_id(process: ServiceProcess) -> int:
    assert process.pid is not None, f"{process.spec.name} has ended"
    return process.pid


def _log_line(name: str, line: str) -> None:
    if " INFO " not in line:
        logger.warning("%s: %s", name, line)


def _median(values: Any) -> float:
    return round(statistics.median(values), 4)


def _quantiles(values: list[float]) -> list[float]:
    return [round(statistics.median(values), 3), round(statistics.quantiles(values, n=10)[-1], 3)]


if __name__ == "__main__":
    main()
