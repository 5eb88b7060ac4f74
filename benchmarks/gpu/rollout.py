"""A rollout: a batch whose sequences have lengths with a long tail, until the last token of the last one. As the batch drains, more drafts pay."""

import asyncio
import itertools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu import pareto_bars
from benchmarks.gpu.pareto_cells import FIXED, NUM_DRAFT_TOKENS, SIGMA, ParetoSizes, Policy
from benchmarks.gpu.slices import Slice, show_rows
from benchmarks.gpu.window import run_to_end
from specwire.messages import CoordinatorStatus

if TYPE_CHECKING:
    from benchmarks.gpu.pareto import Bench

MIX = "uniform"
_POINT_COUNTS, _POINT_KS = (1, 16, 64, 256), (0, 3, 7)
"""Steps from which the schedule is advised, where no others have been measured."""
_COMPARED = 1.1
"""A fixed K that took longer than so many times the best one's time is not measured again."""
_SAMPLE_S = 0.02
_FIRST_NUMBER = 800_000


async def measure_rollout(part: Slice, bench: "Bench") -> None:
    """All policies once, then those that can decide a bar again, forth and back; at last the K over time of some."""
    scale, most = bench.scale, bench.max_num_seqs
    lengths = rollout_lengths(scale, most)
    part.note(lengths={"median": scale.median_length, "spread": scale.spread, "longest": max(lengths), "mean": statistics.mean(lengths)})
    counts = [count for count in _POINT_COUNTS if count <= most]
    if not bench.points.by_shape:
        for count in counts:
            for k in _POINT_KS:
                bench.points.add(k, await bench.measure(Policy.fixed(k, most), MIX, SIGMA, count, 0), bench.context_len(count))
    advised, adaptive = bench.advise(MIX), Policy("adaptive", ((1, most, NUM_DRAFT_TOKENS),), is_adaptive=True)
    part.note(advised=advised.schedule)
    for count in counts[::-1]:
        await bench.warm_up(adaptive, MIX, SIGMA, count)
    fixed = [Policy.fixed(k, most) for k in FIXED]
    policies = [Policy.fixed(0, most), *fixed, advised, adaptive]
    seconds: dict[str, list[float]] = {policy.name: [await _run(bench, policy, lengths, 0)] for policy in policies}
    best_s = min(seconds[policy.name][0] for policy in fixed)
    compared = [policy for policy in policies if policy not in fixed or seconds[policy.name][0] <= _COMPARED * best_s]
    for repeat in range(1, scale.sizes.num_repeats):
        for policy in compared[::-1] if repeat % 2 else compared:
            seconds[policy.name].append(await _run(bench, policy, lengths, repeat))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for policy in policies:
        row: dict[str, Any] = {"policy": policy.name, "num_sequences": most, "num_tokens": sum(lengths), "seconds": medians[policy.name]}
        row |= {"x_none": medians[policy.name] / medians["none"], "seconds_of_repeats": seconds[policy.name]}
        if policy in (advised, adaptive):
            row["k_over_time"] = await _sample(bench, policy, lengths)
        part.add(row)
    bars = list(pareto_bars.evaluate_rollout(medians))
    part.note(bars=bars)
    show_rows(bars)


def rollout_lengths(scale: ParetoSizes, count: int) -> list[int]:
    """Tokens of each sequence: lognormal, the same at every call."""
    drawn = np.random.default_rng(0).lognormal(np.log(scale.median_length), scale.spread, count)
    return [int(length) for length in np.clip(drawn, 4, scale.longest)]


async def _run(bench: "Bench", policy: Policy, lengths: list[int], repeat: int) -> float:
    """Seconds of a whole rollout."""
    await bench.set_policy(policy)
    return await run_to_end(bench.served, bench.requests(MIX, SIGMA, _FIRST_NUMBER + 1000 * repeat, lengths))


async def _sample(bench: "Bench", policy: Policy, lengths: list[int]) -> list[dict[str, float]]:
    """One more rollout, watched: for each span of time, how many sequences ran, and how many drafts a step verified of each."""
    clock = asyncio.get_running_loop().time
    await bench.set_policy(policy)
    statuses: list[tuple[float, CoordinatorStatus]] = []
    started_s = clock()
    watching = asyncio.create_task(_watch(bench, statuses, clock))
    try:
        await run_to_end(bench.served, bench.requests(MIX, SIGMA, _FIRST_NUMBER, lengths))
    finally:
        watching.cancel()
    return k_over_time([(seconds - started_s, status) for seconds, status in statuses])


async def _watch(bench: "Bench", statuses: list[tuple[float, CoordinatorStatus]], clock: Callable[[], float]) -> None:
    """Until cancelled."""
    while True:
        statuses.append((clock(), await bench.served.status()))
        await asyncio.sleep(_SAMPLE_S)


def k_over_time(statuses: list[tuple[float, CoordinatorStatus]]) -> list[dict[str, float]]:
    """From states at seconds: at the end of each span in which tokens came, verified drafts a step and sequence, and sequences that run."""
    points = []
    for (_, before), (seconds, after) in itertools.pairwise(statuses):
        num_rows = after.num_generated_tokens - before.num_generated_tokens - (after.num_accepted_tokens - before.num_accepted_tokens)
        if num_rows > 0:
            drafts = (after.num_draft_tokens - before.num_draft_tokens) / num_rows
            points.append({"seconds": seconds, "k": drafts, "num_running": float(after.lanes[0].num_running)})
    return points
