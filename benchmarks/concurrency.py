"""Whether drafts are as good among many sequences as for one alone: accepted drafts at 16 requests at once and at one.

python -m benchmarks.concurrency --prompts PROMPTS.jsonl.gz [--methods eagle3 ...] [--num-prompts 90] [--num-drafts 5]

Real services on a CPU, as `benchmarks.lists_cpu` starts them; the same requests, greedy and at a temperature of 0.7 in turns, with fixed seeds, first
one by one, then so many at once, through the prefix caches of the first time. What is compared is the mean number of accepted drafts of a step with
drafts.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lists_cpu import choose, encode, make_parser, serve_in_turn
from benchmarks.report import Bystanders, print_table, write_report
from specwire.bench.workload import read_prompt_file
from specwire.client import AsyncClient
from specwire.messages import SpecStats
from specwire.sampling_params import SamplingParams
from tests.integration.invariance import add_spec

METHODS: dict[str, tuple[str, ...]] = {"ngram": ("ngram",), "suffix": ("suffix",), "eagle3": ("eagle3",), "ngram+eagle3": ("ngram", "eagle3")}
_TEMPERATURES = (0.0, 0.7)
_MOST_ERRORS = 2.0
_LEAST_DRAFTS = 5_000


def main() -> None:
    parser = make_parser()
    parser.description = __doc__
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.set_defaults(concurrency=16, num_prompts=90)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    results = asyncio.run(run(args))
    print_table(
        ["drafter", "drafts, one", f"drafts, {args.concurrency}", "accepted, one", f"accepted, {args.concurrency}", "standard errors apart"],
        [
            [
                row["drafter"], *[str(count) for count in row["num_drafts"]], *[f"{mean:.4f}" for mean in row["accepted_of_a_draft"]],
                f"{row['standard_errors_apart']:.2f}",
            ]
            for row in results
        ],
    )  # fmt: skip
    figures = {
        "unit": "accepted drafts of a step with drafts, at one request at a time and at so many at once",
        "model": args.model, "precision": args.precision, "head": Path(args.head).name, "num_drafts": args.num_drafts, "tokens": args.tokens,
        "concurrency": [1, args.concurrency], "num_prompts": args.num_prompts, "temperatures": list(_TEMPERATURES), "results": results,
    }  # fmt: skip
    print(write_report("concurrency", figures, args.output, bystanders))


async def run(args: Any) -> list[dict[str, Any]]:
    """A row for each drafter."""
    prompts = [prompt for _, prompt in encode(args.model, choose(read_prompt_file(args.prompts), args.num_prompts))]
    results = []
    async for name, client in serve_in_turn(args, {name: METHODS[name] for name in args.methods}):
        alone, together = [await ask(client, prompts, args.tokens, concurrency) for concurrency in (1, args.concurrency)]
        results.append({"drafter": name} | compare(alone, together))
        print(results[-1], flush=True)
    return results


async def ask(client: AsyncClient, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> SpecStats:
    """All prompts, closed loop; their statistics, summed."""
    waiting, spec = iter(enumerate(prompts)), SpecStats()

    async def serve_some() -> None:
        nonlocal spec
        for index, prompt in waiting:
            params = SamplingParams(temperature=_TEMPERATURES[index % len(_TEMPERATURES)], seed=index, max_tokens=max_tokens)
            result = await client.generate(prompt, params)
            spec = add_spec(spec, result.spec)

    await asyncio.gather(*[serve_some() for _ in range(concurrency)])
    return spec


def compare(alone: SpecStats, together: SpecStats) -> dict[str, Any]:
    """Both means, and how many standard errors of their difference lie between them, drafts taken as independent."""
    (mean, error), (other, other_error) = moments(alone), moments(together)
    both = math.hypot(error, other_error)
    apart = abs(mean - other) / both if both else 0.0 if mean == other else math.inf
    return {
        "num_drafts": [alone.num_drafts, together.num_drafts],
        "accepted_of_a_draft": [round(mean, 4), round(other, 4)],
        "standard_error_of_difference": round(both, 4),
        "standard_errors_apart": round(apart, 2),
        "is_within_two": apart < _MOST_ERRORS,
        "has_enough_drafts": min(alone.num_drafts, together.num_drafts) >= _LEAST_DRAFTS,
    }


def moments(spec: SpecStats) -> tuple[float, float]:
    """Mean of accepted tokens over the drafts, and its standard error."""
    if not spec.num_drafts:
        return 0.0, 0.0
    # The i-th count is of drafts with more than i accepted tokens, so that the sum of squares is that of 2i + 1 over them.
    mean = sum(spec.accepted_per_position) / spec.num_drafts
    square = sum((2 * position + 1) * count for position, count in enumerate(spec.accepted_per_position)) / spec.num_drafts
    return mean, math.sqrt(max(0.0, square - mean**2) / spec.num_drafts)


if __name__ == "__main__":
    main()
