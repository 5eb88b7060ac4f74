"""Verifiers and drafters on two GPUs: llama-8b and llama-1b with made-up weights, drafts accepted at given rates, K = 5 unless said otherwise.

placement: a drafter with a GPU of its own, one that shares the verifier's, and plain decoding; halves: two half batches of one lane, the drafter on
the other GPU, against steps one after the other; lanes: verifier and drafter on each GPU against one such pair, with K by batch size. Prompts come
from the prefix caches. Tokens a second as `draft` has them, the best of two.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gpu.draft import read_cost
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.load import random_prompts
from benchmarks.gpu.schedule import Schedule, choose_schedule
from benchmarks.gpu.sizes import Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slice, Slices, make_parser
from benchmarks.gpu.two_gpus_lanes import measure_lanes
from benchmarks.gpu.two_gpus_services import Services, Tracer, fixed, measure_batch, serve_services, synthetic_rates

SLICES = SECONDS["two_gpus"]
"""Each with the start of its services; placement and halves in one command start them once."""
_PLACEMENTS = {"own": ("d1", True, 2), "shared": ("d0", True, 1), "plain": ("d0", False, 1)}
"""The drafter, whether it drafts, and GPUs that are counted."""
_MIN_HALVED = 32
"""Sequences from which on half batches are measured."""
_LANES_STEPS = 256
"""Long enough for lanes to be watched while they work."""


async def measure_placement(part: Slice, services: Services, prompts: list[list[int]]) -> None:
    """One drafter after the other; then what a GPU of its own brings."""
    sizes = services.peers.sizes
    for name, (drafter, is_drafting, num_gpus) in _PLACEMENTS.items():
        counts = [count for count in sizes.concurrency if not part.has(c=count, placement=name)]
        if not counts:
            continue
        k = sizes.num_draft_tokens if is_drafting else 0
        async with services.coordinate(fixed(sizes, k), ["v0"], [drafter]) as served:
            tracer = Tracer(served, num_rounds=1, shares_gpu=name == "shared")
            for count in counts:
                row: dict[str, Any] = {"c": count, "placement": name, "k": k, **await measure_batch(served, prompts[:count])}
                row["tok_s_per_gpu"] = row["tok_s"] / num_gpus
                await tracer.trace(row, prompts[:count])
                part.add(row)
            await tracer.finish()
    tok_s = _tok_s(part, "placement")
    part.note(
        own_x_shared={count: tok_s["own"][count] / tok_s["shared"][count] for count in sizes.concurrency},
        own_x_shared_per_gpu={count: tok_s["own"][count] / (2 * tok_s["shared"][count]) for count in sizes.concurrency},
        shared_x_plain={count: tok_s["shared"][count] / tok_s["plain"][count] for count in sizes.concurrency},
    )


async def measure_halves(part: Slice, services: Services, prompts: list[list[int]]) -> None:
    """One step after the other, then half batches."""
    sizes = services.peers.sizes
    counts = [count for count in sizes.concurrency if count >= _MIN_HALVED] or [count for count in sizes.concurrency if count > 1]
    for name, half_batches_from, num_rounds in (("lockstep", 0, 1), ("halves", 2, 2)):
        left = [count for count in counts if not part.has(c=count, steps=name)]
        if not left:
            continue
        schedule = fixed(sizes, sizes.num_draft_tokens)
        async with services.coordinate(schedule, ["v0"], ["d1"], half_batches_from=half_batches_from) as served:
            tracer = Tracer(served, num_rounds=num_rounds, shares_gpu=False)
            for count in left:
                row: dict[str, Any] = {"c": count, "steps": name, "k": sizes.num_draft_tokens, **await measure_batch(served, prompts[:count])}
                await tracer.trace(row, prompts[:count])
                part.add(row)
            await tracer.finish()
    tok_s = _tok_s(part, "steps")
    part.note(halves_x_lockstep={count: tok_s["halves"][count] / tok_s["lockstep"][count] for count in counts})


def _tok_s(part: Slice, column: str) -> dict[str, dict[int, float]]:
    """Of all rows, by this column and the number of sequences."""
    found: dict[str, dict[int, float]] = {}
    for row in part.rows:
        found.setdefault(row[column], {})[row["c"]] = row["tok_s"]
    return found


async def choose_k(services: Services) -> Schedule:
    """By the tables that the pair on the first GPU measured at its start. Those of tiny models say nothing, and K must differ by load to be shown."""
    sizes = services.peers.sizes
    if services.is_tiny:
        return (1, 1, sizes.num_draft_tokens), (2, sizes.max_num_seqs, 2)
    addresses = {"verifier": services.addresses["v0"], "drafter": services.addresses["d0"]}
    peers = replace(
        services.peers,
        verifier=replace(services.peers.verifier, listen=(addresses["verifier"],)),
        drafter=replace(services.peers.drafter, listen=(addresses["drafter"],)),
    )
    cost = await read_cost(peers)
    return choose_schedule(cost, synthetic_rates(sizes), sizes.max_num_seqs, sizes.num_prompt_tokens + sizes.num_steps // 2)


async def measure(slices: Slices, names: Sequence[str], sizes: Sizes, device: str, gpus: Sequence[str], *, is_tiny: bool) -> None:
    """The slices asked for, behind as few services as they need."""
    one_lane = [name for name in names if name != "lanes"]
    if one_lane:
        needed = ["v0", "d1", "d0"] if "placement" in names else ["v0", "d1"]
        with tempfile.TemporaryDirectory(prefix="sw-") as folder:
            async with serve_services(Path(folder), needed, sizes, device, gpus, is_tiny=is_tiny) as services:
                prompts = random_prompts(services.peers.vocab_size, sizes.max_num_seqs, sizes.num_prompt_tokens)
                for name in one_lane:
                    with slices.open(name, keep=lambda row: "period_ms" in row) as part:
                        part.note(gpus=list(gpus))
                        await (measure_placement if name == "placement" else measure_halves)(part, services, prompts)
    if "lanes" in names:
        sizes = replace(sizes, num_steps=_LANES_STEPS)
        with tempfile.TemporaryDirectory(prefix="sw-") as folder:
            async with serve_services(Path(folder), ["v0", "d0", "v1", "d1"], sizes, device, gpus, is_tiny=is_tiny) as services:
                prompts = random_prompts(services.peers.vocab_size, max(2, sizes.max_num_seqs), sizes.num_prompt_tokens)
                with slices.open("lanes") as part:
                    part.note(gpus=list(gpus))
                    await measure_lanes(part, services, await choose_k(services), prompts)


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    parser.add_argument("--gpus", nargs=2, default=["0", "1"], metavar="GPU", help="the two, as CUDA_VISIBLE_DEVICES has them; one twice to try it")
    slices, options = Slices.parse("two_gpus", parser, arguments)
    if names := slices.pending():
        uvloop.run(measure(slices, names, chosen_sizes(options), options.device, options.gpus, is_tiny=options.tiny))


if __name__ == "__main__":
    main()
