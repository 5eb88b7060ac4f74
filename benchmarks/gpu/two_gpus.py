"""Verifiers and drafters on two GPUs: llama-8b with made-up weights; drafts of llama-1b (K = 5) or an EAGLE-3 head (K = 3), accepted at given rates.

placement: a drafter with a GPU of its own, with half batches, too, one that shares the verifier's, and plain decoding; lanes: verifier and drafter on
each GPU against one such pair, with K by batch size; loss: real weights, what tokens are when a lane is killed. Prompts come from the prefix caches.
Tokens a second as `draft` has them, the best of two.
"""

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.draft import read_cost
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.load import random_prompts
from benchmarks.gpu.schedule import Schedule, choose_schedule
from benchmarks.gpu.sizes import Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slice, Slices, make_parser
from benchmarks.gpu.two_gpus_lanes import measure_lanes
from benchmarks.gpu.two_gpus_placement import measure_placement, needed_services
from benchmarks.gpu.two_gpus_services import Services, serve_services, synthetic_rates
from specwire.config import DEFAULT_MODEL

SLICES = SECONDS["two_gpus"]
"""Each with the start of its services."""
_LANES_STEPS = 256
"""Long enough for lanes to be watched while they work."""
_LEAST_PROMPTS = 4
"""Two of each lane, so that their loads can differ."""


async def choose_k(services: Services) -> Schedule:
    """By the tables that the pair on the first GPU measured at its start. Those of tiny models say nothing, and K must differ by load to be shown."""
    sizes = services.peers.sizes
    if services.is_tiny:
        return (1, 1, sizes.num_draft_tokens), (2, sizes.max_num_seqs, 2)
    peers = services.peers
    cost = await read_cost(
        replace(
            peers,
            verifier=replace(peers.verifier, listen=(services.addresses["v0"],)),
            drafter=replace(peers.drafter, listen=(services.addresses["d0"],)),
        )
    )
    return choose_schedule(cost, synthetic_rates(sizes.num_draft_tokens), sizes.max_num_seqs, sizes.num_prompt_tokens + sizes.num_steps // 2)


async def measure_services(part: Slice, name: str, sizes: Sizes, options: argparse.Namespace) -> None:
    """A slice of made-up weights, behind services of its own."""
    names = needed_services(part, sizes.concurrency) if name == "placement" else ["v0", "d0", "v1", "d1"]
    if name == "lanes":
        sizes = replace(sizes, num_steps=_LANES_STEPS)
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        async with serve_services(
            Path(folder), names, sizes, options.device, options.gpus, is_tiny=options.tiny, is_priced=name == "lanes"
        ) as services:
            part.note(gpus=list(options.gpus))
            prompts = random_prompts(services.peers.vocab_size, max(_LEAST_PROMPTS, sizes.max_num_seqs), sizes.num_prompt_tokens)
            if name == "placement":
                await measure_placement(part, services, prompts[: sizes.max_num_seqs])
            else:
                await measure_lanes(part, services, await choose_k(services), prompts)


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    parser.add_argument("--gpus", nargs=2, default=["0", "1"], metavar="GPU", help="the two, as CUDA_VISIBLE_DEVICES has them; one twice to try it")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="loss: folder or GGUF file of the real weights")
    parser.add_argument("--head", default="", help="loss: folder of a draft head of the model, if it is not the committed one")
    slices, options = Slices.parse("two_gpus", parser, arguments)
    sizes = chosen_sizes(options)
    for name in slices.pending():
        if name == "loss":
            from benchmarks.gpu import two_gpus_loss  # brings transformers

            with slices.open(name, keep=lambda row: True) as part:
                wrong = two_gpus_loss.measure_loss(part, options)
            two_gpus_loss.say(wrong)
            continue
        with slices.open(name, keep=lambda row: "period_ms" in row or "x_one" in row) as part:
            asyncio.run(measure_services(part, name, sizes, options))


if __name__ == "__main__":
    main()
