"""The services of `two_gpus`: verifiers and drafters with a GPU each, one coordinator after the other in front of some; and how they are measured."""

import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import peer
from benchmarks.gpu.breakdown import TraceKey, break_down, read_traces
from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, TINY, TINY_DRAFT, save_shape
from benchmarks.gpu.load import run_batch
from benchmarks.gpu.processes import Log, running
from benchmarks.gpu.schedule import Schedule
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.stack import UNIX, Peers, Served, drafter_config, serve_coordinator, verifier_config
from specwire.cli.trace import FileSpan, read_spans
from specwire.config import DrafterConfig, VerifierConfig
from specwire.launch import Supervisor
from specwire.speculative_config import SpeculativeConfig

_DRAFT_KV_BYTES = 16 << 30
_TINY_KV_BYTES = 16 << 20
_DRAFT_WAIT_MS, _TINY_WAIT_MS = 100.0, 10_000.0
"""A step waits so long for its drafts at least: what is compared is how long they take, not when they are given up."""
_FLUSH_TIMEOUT_S = 5.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Services:
    """Those that run, by name: v0, v1 are verifiers and d0, d1 drafters on the first and the second GPU.

    Args:
        peers: v0, and one of the drafters.
        addresses, supervisors: of each.
    """

    peers: Peers
    is_tiny: bool
    addresses: dict[str, str] = field(default_factory=dict)
    supervisors: dict[str, Supervisor] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def coordinate(self, schedule: Schedule, verifiers: Sequence[str], drafters: Sequence[str], **fields: Any) -> AsyncIterator[Served]:
        """A coordinator in front of these, every drafter connected to every lane.

        Args:
            schedule: K by batch size.
            fields: more of its configuration.
        """
        log = self.peers.log
        since = len(log.lines)
        speculative = dataclasses.replace(self.peers.verifier.speculative_config, num_speculative_tokens_per_batch_size=schedule)
        async with serve_coordinator(
            self.peers,
            UNIX,
            speculative,
            verifiers=tuple(self.addresses[name] for name in verifiers),
            drafters=tuple(self.addresses[name] for name in drafters),
            min_draft_wait_ms=_TINY_WAIT_MS if self.is_tiny else _DRAFT_WAIT_MS,
            **fields,
        ) as served:
            for lane in range(len(verifiers)):
                for name in drafters:
                    await log.wait_for(f"lane {lane}: drafter {self.addresses[name]} is there", since)
            yield served


def fixed(sizes: Sizes, k: int) -> Schedule:
    """The same K for every number of sequences."""
    return ((1, sizes.max_num_seqs, k),)


def synthetic_rates(sizes: Sizes) -> tuple[float, ...]:
    """Probability that the first i drafts are all accepted, for i = 1..K_max."""
    known = peer.SYNTHETIC_RATES
    return known[: sizes.num_draft_tokens] + (0.0,) * (sizes.num_draft_tokens - len(known))


@contextlib.asynccontextmanager
async def serve_services(
    folder: Path, names: Sequence[str], sizes: Sizes, device: str, gpus: Sequence[str], *, is_tiny: bool
) -> AsyncIterator[Services]:
    """Processes with llama-8b's and llama-1b's shape; v0 is always there.

    They start side by side where they have different GPUs, and one after the other where they share one: measurements of costs would disturb each
    other. v0 is the first of all, since it fills the cache of compiled kernels.
    """
    target, draft = (TINY, TINY_DRAFT) if is_tiny else (LLAMA_8B, LLAMA_1B)
    speculative = SpeculativeConfig(
        method="draft_model",
        model=str(save_shape(draft, folder / "draft")),
        num_speculative_tokens=sizes.num_draft_tokens,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=synthetic_rates(sizes),
        max_model_len=sizes.max_model_len,
    )
    verifier = verifier_config(folder, save_shape(target, folder / "target"), sizes, device, speculative)
    verifier = dataclasses.replace(verifier, enable_prefix_caching=True, num_kv_blocks=2 * verifier.num_kv_blocks)
    drafter = dataclasses.replace(
        drafter_config(folder, sizes, device, speculative),
        kv_cache_memory=_TINY_KV_BYTES if is_tiny else _DRAFT_KV_BYTES,
        trace_file=verifier.trace_file,
    )
    log = Log()
    services = Services(Peers(folder, sizes, target.vocab_size, verifier, drafter, log), is_tiny)
    async with contextlib.AsyncExitStack() as resources:

        async def start(name: str) -> None:
            config: VerifierConfig | DrafterConfig = verifier if name.startswith("v") else drafter
            config = dataclasses.replace(config, listen=(f"unix:{folder}/{name}",))
            module = "verifier_svc" if name.startswith("v") else "drafter_svc"
            command = ("benchmarks.gpu.two_gpus_device", gpus[int(name[1:])], module)
            services.supervisors[name] = await resources.enter_async_context(running(config, log=log, command=command))
            services.addresses[name] = config.listen[0]

        async def start_all(names: Sequence[str]) -> None:
            for name in names:
                await start(name)

        await start("v0")
        async with asyncio.TaskGroup() as starting:
            for gpu in dict.fromkeys(gpus):
                starting.create_task(start_all([name for name in sorted(names, reverse=True) if name != "v0" and gpus[int(name[1:])] == gpu]))
        yield services


async def measure_batch(served: Served, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens a second of one batch, as `draft` measures them: (time of all tokens - time of 1 token), warmed up, the best of two."""
    num_steps, count = served.peers.sizes.num_steps, len(prompts)
    await run_batch(served.channel, prompts, num_steps + 1)
    firsts, totals = [], []
    for _ in range(max(1, served.peers.sizes.num_repeats - 1)):
        firsts.append((await run_batch(served.channel, prompts, 1)).seconds)
        totals.append(await run_batch(served.channel, prompts, num_steps + 1))
    best = min(totals, key=lambda generated: generated.seconds)
    status = await served.status()
    return {
        "tok_s": count * num_steps / (best.seconds - min(firsts)),
        "acceptance_length": best.spec.acceptance_length,
        "drafted_share": best.spec.num_drafts / best.spec.num_steps,
        "fallbacks": dict(status.fallbacks_by_cause),
        "coordinator_step": [dataclasses.asdict(lane.times) for lane in status.lanes],
        "first_token_s_of_repeats": firsts,
        "total_s_of_repeats": [generated.seconds for generated in totals],
    }


@dataclass(slots=True)
class Tracer:
    """Batches whose first request is traced, to be broken down at the end.

    Args:
        num_rounds: that the verifier runs in the time in which a sequence has one: two with half batches.
        shares_gpu: drafter and verifier have one.
    """

    served: Served
    num_rounds: int
    shares_gpu: bool
    traced: list[tuple[dict[str, Any], TraceKey, list[tuple[int, int]]]] = field(default_factory=list)

    async def trace(self, row: dict[str, Any], prompts: list[list[int]]) -> None:
        """One more batch, for this row."""
        key = TraceKey.random()
        generated = await run_batch(self.served.channel, prompts, self.served.peers.sizes.num_steps + 1, traceparent=key.traceparent)
        self.traced.append((row, key, generated.arrivals))

    async def finish(self) -> None:
        """Adds to each row where the median step's time goes, and how much of it each GPU is idle."""
        path = self.served.peers.trace_file
        spans = await read_traces(path, [key for _, key, _ in self.traced])
        drafts = await _read_drafts(path, spans)
        for row, key, arrivals in self.traced:
            row |= break_down(spans[key.hex], arrivals)
            draft_ms = statistics.median(drafts[key.hex]) if drafts[key.hex] else 0.0
            busy = {"verifier": self.num_rounds * row["forward_ms"], "drafter": self.num_rounds * draft_ms}
            if self.shares_gpu:
                busy = {"shared": sum(busy.values())}
            row |= {"draft_ms": draft_ms, "draft_hop_ms": row["propose_ms"] - draft_ms}
            row |= {f"{name}_gpu_idle": max(0.0, 1 - busy_ms / row["period_ms"]) for name, busy_ms in busy.items()}


async def _read_drafts(path: Path, spans: dict[str, list[FileSpan]]) -> dict[str, list[float]]:
    """Milliseconds of the drafter's work on each proposal of each trace; the drafter exports about a second late."""
    proposals = {span.span_id for trace in spans.values() for span in trace if span.name == "propose"}
    deadline = time.monotonic() + _FLUSH_TIMEOUT_S
    while True:
        found = {span.parent_id: span for span in read_spans(path)[0] if span.name == "draft" and span.parent_id in proposals}
        if len(found) == len(proposals) or time.monotonic() > deadline:  # one that came too late may have none
            break
        await asyncio.sleep(_PAUSE_S)
    return {trace_id: [span.duration_ms for span in found.values() if span.trace_id == trace_id] for trace_id in spans}
