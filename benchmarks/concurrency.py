"""Whether drafts are as good among many sequences as for one alone: accepted drafts at 16 requests at once and at one.

python -m benchmarks.concurrency --prompts PROMPTS.jsonl.gz [--head FOLDER] [--methods eagle3 ...] [--least-drafts 5100] [--num-drafts 5]

Real services on a CPU, as `benchmarks.lists_cpu` starts them; requests greedy and at a temperature of 0.7 in turns, with fixed seeds, first one by
one until there were enough drafts, then the same requests so many at once. What is compared is the mean number of accepted drafts of a step with
drafts. The second time they go through the prefix caches of the first. Only those of `suffix`, which drafts from past answers, come as another
tenant, as it would else draft from the very same answers. The draft model is the target with noise.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lists_cpu import choose, encode, head_method, make_parser, serve_in_turn
from benchmarks.report import Bystanders, print_table, write_report
from specwire.bench.workload import read_prompt_file
from specwire.client import AsyncClient
from specwire.engine.checkpoint import resolve_model
from specwire.messages import SpecStats
from specwire.sampling_params import SamplingParams
from tests.integration.invariance import add_spec
from tests.integration.noisy_model import noisy_twin

_TEMPERATURES = (0.0, 0.7)
_MOST_ERRORS = 2.0
_LEAST_DRAFTS = 5_000
_OTHER_TENANT = b"another"


def main() -> None:
    parser = make_parser()
    parser.description = __doc__
    parser.add_argument("--methods", nargs="+", help="ngram, suffix, draft_model, that of the head, or ngram+ that (default: all)")
    parser.add_argument("--least-drafts", type=int, default=5_100, help="of the requests one by one")
    parser.set_defaults(concurrency=16, num_prompts=1_000)
    args = parser.parse_args()
    methods = methods_with(args.head)
    if unknown := set(args.methods or ()) - set(methods):
        parser.error(f"--methods are {' '.join(args.methods)}, but {args.head} has none for {' '.join(unknown)}; take some of {' '.join(methods)}")
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    results = asyncio.run(run(args, {name: methods[name] for name in args.methods or methods}, bystanders))
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


def methods_with(head: str) -> dict[str, tuple[str, ...]]:
    """Drafters by name, of which some have the head in this folder."""
    method = head_method(head)
    return {
        method: (method,),
        f"ngram+{method}": ("ngram", method),
        "suffix": ("suffix",),
        "ngram": ("ngram",),
        "draft_model": ("draft_model",),
    }


async def run(args: Any, methods: Mapping[str, tuple[str, ...]], bystanders: Bystanders) -> list[dict[str, Any]]:
    """A row for each drafter; the report, which is named after the methods unless they are all, is written anew after each."""
    prompts = [prompt for _, prompt in encode(args.model, choose(read_prompt_file(args.prompts), args.num_prompts))]
    models = {head_method(args.head): args.head}
    if "draft_model" in methods:
        models["draft_model"] = str(noisy_twin(resolve_model(args.model)))
    report = f"concurrency_{'_'.join(methods)}" if args.methods else "concurrency"
    results = []
    async for name, client, address in serve_in_turn(args, methods, models):
        num_prompts, alone = await ask(client, prompts, args.tokens, 1, args.least_drafts)
        print(f"{name}: {num_prompts} requests one by one, {moments(alone)[0]:.4f} of {alone.num_drafts} drafts", flush=True)
        async with AsyncClient(address, tenant_cache_key=_OTHER_TENANT if "suffix" in methods[name] else b"") as other:
            _, together = await ask(other, prompts[:num_prompts], args.tokens, args.concurrency)
        results.append({"drafter": name, "num_requests": num_prompts} | compare(alone, together))
        print(results[-1], flush=True)
        figures = {
            "unit": "accepted drafts of a step with drafts, at one request at a time and at so many at once",
            "model": args.model, "precision": args.precision, "head": Path(args.head).name, "num_drafts": args.num_drafts, "tokens": args.tokens,
            "concurrency": [1, args.concurrency], "temperatures": list(_TEMPERATURES), "results": results,
        }  # fmt: skip
        print(write_report(report, figures, args.output, bystanders), flush=True)
    return results


async def ask(
    client: AsyncClient, prompts: Sequence[list[int]], max_tokens: int, concurrency: int, least_drafts: float = math.inf
) -> tuple[int, SpecStats]:
    """Prompts, closed loop, all or until there were so many drafts: how many requests that was, and their statistics, summed."""
    waiting, spec, num_requests = iter(enumerate(prompts)), SpecStats(), 0

    async def serve_some() -> None:
        nonlocal spec, num_requests
        while spec.num_drafts < least_drafts:
            index, prompt = next(waiting, (0, None))
            if prompt is None:
                return
            params = SamplingParams(temperature=_TEMPERATURES[index % len(_TEMPERATURES)], seed=index, max_tokens=max_tokens)
            result = await client.generate(prompt, params)
            spec, num_requests = add_spec(spec, result.spec), num_requests + 1

    await asyncio.gather(*[serve_some() for _ in range(concurrency)])
    return num_requests, spec


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
