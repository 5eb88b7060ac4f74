"""How `two_gpus` measures a number of sequences: tokens a second, where the median step goes, how long each GPU is idle, what features take."""

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.breakdown import TraceKey, break_down, read_traces
from benchmarks.gpu.feature_traffic import FeatureTraffic
from benchmarks.gpu.load import run_batch
from benchmarks.gpu.stack import Served
from specwire.messages import CoordinatorStatus

_NUM_WARM_TOKENS = 17
_FILLED_SHARE = 2
_TRACED_SHARE, _LEAST_TRACED = 3, 12
"""A traced batch has one in so many of the steps: its medians need no more."""


async def fill_caches(served: Served, prompts: list[list[int]]) -> None:
    """One batch of them all, long enough for a drafter to compute the prompts: they are in the prefix caches from then on."""
    await run_batch(served.channel, prompts, served.peers.sizes.num_steps // _FILLED_SHARE, is_seeded=True)


async def measure_batch(served: Served, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens a second of one batch: (time of all tokens - time of 1 token), warmed up, the best of the repeats but one. Seeds are the same in all
    batches, so that those of other services accept the same drafts."""
    num_steps, count = served.peers.sizes.num_steps, len(prompts)
    await run_batch(served.channel, prompts, min(_NUM_WARM_TOKENS, num_steps), is_seeded=True)
    before = await served.status()
    firsts, totals = [], []
    for _ in range(max(1, served.peers.sizes.num_repeats - 1)):
        firsts.append((await run_batch(served.channel, prompts, 1, is_seeded=True)).seconds)
        totals.append(await run_batch(served.channel, prompts, num_steps + 1, is_seeded=True))
    best = min(totals, key=lambda generated: generated.seconds)
    status = await served.status()
    fallbacks = {cause: number - before.fallbacks_by_cause.get(cause, 0) for cause, number in status.fallbacks_by_cause.items()}
    return {
        "tok_s": count * num_steps / (best.seconds - min(firsts)),
        "acceptance_length": best.spec.acceptance_length,
        "drafted_share": best.spec.num_drafts / best.spec.num_steps,
        "drafters_a_step": _num_replies(status, before) / max(1, _num_steps(status, before)),
        "fallbacks": {cause: number for cause, number in fallbacks.items() if number},
        "coordinator_step": [dataclasses.asdict(lane.times) for lane in status.lanes],
        "first_token_s_of_repeats": firsts,
        "total_s_of_repeats": [generated.seconds for generated in totals],
    }


def _num_replies(status: CoordinatorStatus, before: CoordinatorStatus) -> int:
    """Of all drafters, since then."""
    return sum(drafter.num_replies for drafter in status.drafters) - sum(drafter.num_replies for drafter in before.drafters)


def _num_steps(status: CoordinatorStatus, before: CoordinatorStatus) -> int:
    """Of all lanes, since then; those without drafts, too."""
    return sum(lane.num_steps for lane in status.lanes) - sum(lane.num_steps for lane in before.lanes)


@dataclass(slots=True)
class Tracer:
    """Batches whose first request is traced, to be broken down at the end.

    Args:
        num_rounds: that the verifier runs in the time in which a sequence has one: two with half batches.
        shares_gpu: drafter and verifier have one.
        metrics: host:port, of a drafter that reads features; "" for others.
    """

    served: Served
    num_rounds: int
    shares_gpu: bool
    metrics: str = ""
    traced: list[tuple[dict[str, Any], TraceKey, list[tuple[int, int]]]] = field(default_factory=list)

    async def trace(self, row: dict[str, Any], prompts: list[list[int]]) -> None:
        """One more batch, for this row."""
        key, before = TraceKey.random(), await self._read_traffic()
        most = self.served.peers.sizes.num_steps
        num_tokens = min(most, max(_LEAST_TRACED, most // _TRACED_SHARE)) + 1
        generated = await run_batch(self.served.channel, prompts, num_tokens, traceparent=key.traceparent, is_seeded=True)
        self.traced.append((row, key, generated.arrivals))
        if before is not None and (after := await self._read_traffic()) is not None:
            row["features"] = after.since(before)

    async def finish(self) -> None:
        """Adds to each row where the median step's time goes, how much of it each GPU is idle, and what of it reading features takes."""
        spans = await read_traces(self.served.peers.trace_file, [key for _, key, _ in self.traced], with_drafts=True)
        for row, key, arrivals in self.traced:
            row |= break_down(spans[key.hex], arrivals)
            row |= {"draft_hop_ms": row["propose_ms"] - row["draft_ms"], **idle_shares(row, self.num_rounds, shares_gpu=self.shares_gpu)}
            for path, read in row.get("features", {}).items():
                row[f"{path}_bytes_per_step"] = read["bytes_per_read"]
                row[f"{path}_ms_per_step"] = read["ms_per_read"]
                row[f"{path}_share_of_step"] = self.num_rounds * read["ms_per_read"] / row["period_ms"]

    async def _read_traffic(self) -> FeatureTraffic | None:
        return await asyncio.to_thread(FeatureTraffic.read, self.metrics) if self.metrics else None


def idle_shares(row: dict[str, Any], num_rounds: int, *, shares_gpu: bool) -> dict[str, float]:
    """Of the time between two steps of a sequence, by GPU: without the forward pass and without the drafter's work."""
    busy = {"verifier": num_rounds * row["forward_ms"], "drafter": num_rounds * row["draft_ms"]}
    if shares_gpu:
        busy = {"shared": sum(busy.values())}
    return {f"{name}_gpu_idle": max(0.0, 1 - busy_ms / row["period_ms"]) for name, busy_ms in busy.items()}
