"""Many requests through a real coordinator for minutes: its memory stays flat, and every token and counter is exact.

python -m benchmarks.soak

Scripted drafter and verifier (no model), the coordinator and each of them a process of its own, all requests from `specwire bench`'s load generator.
Every answer is compared token by token with what the scripted target alone gives.
"""

import argparse
import asyncio
import dataclasses
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, print_table, write_report
from specwire.bench.arrivals import arrival_times
from specwire.bench.backend import grpc_backend
from specwire.bench.metrics import measure, to_figures
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.server_counts import Counts
from specwire.bench.workload import Lengths, Prompt, synthetic_prompts
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, flags
from specwire.launch import ServiceSpec, Supervisor
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.scripted.scripts import LETTERS
from tests.scripted.target import Target

logger = logging.getLogger(__name__)

K = 3
MAX_GROWTH_MIB = 4.0
"""What the coordinator's memory may grow by after the first fifth of a run of minutes: caches and pools fill before."""
_TOKENS_PER_STEP = 2.8  # of the scripted drafter's acceptance, about
_PROMPT_LEN = 48


@dataclass(frozen=True, slots=True)
class Plan:
    """How much load for how long.

    Args:
        duration_s: about how long the requests take to come.
        step_s: what a round of the verifier takes.
        sample_s: between two looks at the coordinator's memory.
    """

    num_requests: int = 2000
    concurrency: int = 64
    duration_s: float = 600.0
    step_s: float = 0.1
    sample_s: float = 10.0

    @property
    def output_len(self) -> int:
        """Mean tokens of an answer, so that it takes as long as `concurrency` requests take to come (Little's law)."""
        seconds = self.concurrency * self.duration_s / self.num_requests
        return max(1, round(seconds / self.step_s * _TOKENS_PER_STEP))


@dataclass(frozen=True, slots=True)
class Sample:
    """The coordinator's resident memory, seconds after the start."""

    time_s: float
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: server is what the coordinator counted, num_left what it still holds after the last answer."""

    prompts: list[Prompt]
    run: LoadRun
    samples: list[Sample]
    server: Counts
    num_left: int


def main() -> None:
    defaults = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=defaults.num_requests)
    parser.add_argument("--concurrency", type=int, default=defaults.concurrency)
    parser.add_argument("--seconds", type=float, default=defaults.duration_s, help="about how long the requests take to come")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for soak.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    plan = Plan(args.requests, args.concurrency, args.seconds)
    outcome = asyncio.run(soak(plan))
    problems = find_problems(outcome) + find_growth(outcome.samples)
    figures = describe(plan, outcome, problems)
    names = ("completed", "duration", "max_concurrent_requests", "total_output_tokens", "output_throughput", "rss_growth_mib", "rss_last_mib")
    print_table(["", "soak"], [[name, f"{figures[name]:g}"] for name in names])
    print(f"\nwritten to {write_report('soak', figures, args.output)}")
    if problems:
        raise SystemExit("\n".join(problems))


async def soak(plan: Plan) -> Outcome:
    """Starts everything, sends the load and stops everything."""
    with tempfile.TemporaryDirectory(prefix="specwire-soak-") as name:
        folder = Path(name)
        config = coordinator_config(folder)
        coordinator = ServiceSpec("coordinator", "coordinator", tuple(flags(config)), config.listen[0], essential=True)
        supervisor = Supervisor([_peers(folder, plan), [coordinator]], _log_line, startup_timeout_s=120.0)
        try:
            await supervisor.start()
            pid = supervisor.groups[1][0].pid
            assert pid is not None, "the coordinator has ended"
            return await _load(config.listen[0], plan, pid)
        finally:
            await supervisor.stop()


def coordinator_config(folder: Path) -> CoordinatorConfig:
    """A coordinator on sockets in `folder`; no step goes on without its drafts, however busy the machine is."""
    return CoordinatorConfig(
        listen=(f"unix:{folder}/coordinator",),
        verifiers=(f"unix:{folder}/verifier",),
        drafters=(f"unix:{folder}/drafter",),
        min_draft_wait_ms=10_000.0,
        speculative_config=SpeculativeConfig(num_speculative_tokens=K),
    )


def find_problems(outcome: Outcome) -> list[str]:
    """What is not exact: answers, usage, or the coordinator's counters; one sentence each."""
    target = Target(LETTERS)
    problems = []
    for record in outcome.run.records:
        prompt = outcome.prompts[record.index]
        if record.error:
            problems.append(f"request {record.index} failed with {record.error}: {record.error_text}")
        elif record.token_ids != target.generate(prompt.token_ids, prompt.max_tokens, record.index):
            problems.append(f"request {record.index} has other tokens than the target alone gives")
        elif record.usage is None or record.usage.num_generated_tokens != prompt.max_tokens:
            problems.append(f"request {record.index} has the usage {record.usage}, but {prompt.max_tokens} tokens")
    if len(outcome.run.records) != len(outcome.prompts):
        problems.append(f"{len(outcome.run.records)} requests were sent, but there are {len(outcome.prompts)}")
    problems += [
        f"{name}: {told} told to clients, but {counted} counted by the coordinator"
        for name, told, counted in Counts.of_records(outcome.run.records).differences(outcome.server)
    ]
    if outcome.num_left:
        problems.append(f"the coordinator still holds {outcome.num_left} sequences")
    return problems


def find_growth(samples: list[Sample]) -> list[str]:
    """Says so if memory is not flat."""
    growth_mib = rss_growth_mib(samples)
    if growth_mib <= MAX_GROWTH_MIB:
        return []
    return [f"the coordinator's memory grew by {growth_mib:.1f} MiB, but {MAX_GROWTH_MIB:g} are allowed"]


def rss_growth_mib(samples: list[Sample]) -> float:
    """Between the second and the last fifth of the run, medians of both."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples, samples[-fifth:]
    return statistics.median(sample.rss_mib for sample in late) - statistics.median(sample.rss_mib for sample in early)


def describe(plan: Plan, outcome: Outcome, problems: list[str]) -> dict[str, Any]:
    """For JSON."""
    return {
        "num_speculative_tokens": K,
        "plan": {**dataclasses.asdict(plan), "output_len": plan.output_len},
        **to_figures(measure(outcome.run, (50, 99))),
        "rss_growth_mib": round(rss_growth_mib(outcome.samples), 2),
        "rss_last_mib": round(outcome.samples[-1].rss_mib, 1),
        "rss_allowed_growth_mib": MAX_GROWTH_MIB,
        "rss_samples": [[round(sample.time_s, 1), round(sample.rss_mib, 2)] for sample in outcome.samples],
        "counted_by_client": dataclasses.asdict(Counts.of_records(outcome.run.records)),
        "counted_by_coordinator": dataclasses.asdict(outcome.server),
        "problems": problems,
    }


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


async def _load(address: str, plan: Plan, pid: int) -> Outcome:
    lengths = Lengths(_PROMPT_LEN - 16, plan.output_len, "uniform", 0.5, prefix_len=16)
    prompts = synthetic_prompts(plan.num_requests, lengths, LETTERS, seed=0)
    arrivals_s = arrival_times(plan.num_requests, plan.num_requests / plan.duration_s, 1.0, seed=0)
    start_s = time.monotonic()
    samples: list[Sample] = []

    async def sample() -> None:
        while True:
            samples.append(Sample(time.monotonic() - start_s, rss_mib(pid)))
            await asyncio.sleep(plan.sample_s)

    async with AsyncClient(address) as client:
        await client.wait_ready()
        before = await client.get_status()
        send = grpc_backend(client, SamplingParams(seed=0), label="soak")
        generator = LoadGenerator(send, time.monotonic, max_concurrency=plan.concurrency, keep_tokens=True)
        sampling = asyncio.create_task(sample())
        run = await generator.run(prompts, arrivals_s)
        sampling.cancel()
        samples.append(Sample(time.monotonic() - start_s, rss_mib(pid)))
        after = await client.get_status()
    num_left = after.num_waiting + sum(lane.num_running for lane in after.lanes)
    return Outcome(prompts, run, samples, Counts.of_status(before, after), num_left)


def _peers(folder: Path, plan: Plan) -> list[ServiceSpec]:
    max_model_len = _PROMPT_LEN + 2 * plan.output_len
    arguments = {
        "verifier": {
            "max_num_seqs": plan.concurrency, "max_model_len": max_model_len, "max_num_batched_tokens": 16 * plan.concurrency,
            "num_blocks": plan.concurrency * max_model_len, "delay_s": plan.step_s,
        },
        "drafter": {"max_num_seqs": plan.concurrency, "max_model_len": max_model_len},
    }  # fmt: skip
    return [
        ServiceSpec(
            name,
            "tests.scripted",
            (name, f"unix:{folder}/{name}", *(f"{field}={value}" for field, value in changes.items())),
            f"unix:{folder}/{name}",
        )
        for name, changes in arguments.items()
    ]


def _log_line(name: str, line: str) -> None:
    if " INFO " not in line:
        logger.warning("%s: %s", name, line)


if __name__ == "__main__":
    main()
