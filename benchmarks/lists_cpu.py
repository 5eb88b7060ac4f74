"""Lists of methods beside their parts, on real prompts through real services on a CPU: accepted drafts by category.

python -m benchmarks.lists_cpu --prompts PROMPTS.jsonl.gz [--head FOLDER] [--num-prompts 30] [--num-drafts 5]

One verifier, which keeps the head's features throughout; for each drafter one of its own with a coordinator, one after the other. K is fixed, steps
wait for drafts as long as they take, and requests are greedy, so that all draft in the same texts and what is counted does not depend on how
busy the machine is. A list learns what its methods are worth from the texts as they come; all prompts are asked twice, each run is counted.
"""

import argparse
import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu import Decoded, Services
from benchmarks.gpu.bench_answers import category
from benchmarks.gpu.processes import Log, running
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.bench.workload import PromptLine, read_prompt_file
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.heads.kinds import open_head
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.tokenizer import Tokenizer

_ALL = "all"
_CACHE_BYTES = 512 << 20
_STEPS_WAIT_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of a category, and its answer in each run."""

    category: str
    token_ids: list[int]
    runs: list[Decoded]


def main() -> None:
    args = make_parser().parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    lines = choose(read_prompt_file(args.prompts), args.num_prompts)
    head = head_method(args.head)
    asked = asyncio.run(run(args, lines, head))
    names = sorted({one.category for one in asked[next(iter(asked))]})
    texts = {name: [[run.token_ids for run in one.runs] for one in found] for name, found in asked.items()}
    results = [{"drafter": name, "run": number + 1} | describe(found, number, names) for name, found in asked.items() for number in range(args.runs)]
    print_table(
        ["drafter", "run", *[f"{name} ({sum(one.category == name for one in asked[head])})" for name in names], _ALL, "drafted steps"],
        [
            [row["drafter"], str(row["run"]), *[f"{row['tokens_a_step'][name]:.2f}" for name in (*names, _ALL)], f"{row['drafted_steps']:.0%}"]
            for row in results
        ],
    )
    figures = {
        "unit": "tokens a step of the answers but their first tokens, greedy",
        "model": args.model, "precision": args.precision, "head": Path(args.head).name, "num_drafts": args.num_drafts, "tokens": args.tokens,
        "concurrency": args.concurrency, "lookup": [args.lookup_min, args.lookup_max], "num_prompts": len(lines),
        "all_texts_equal": all(found == texts[head] for found in texts.values()), "results": results,
    }  # fmt: skip
    print(write_report("lists_cpu" if head == "eagle3" else f"lists_cpu_{head}", figures, args.output, bystanders))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file with categories")
    parser.add_argument("--num-prompts", type=int, default=30, help="spread over the categories")
    parser.add_argument("--model", default=VerifierConfig().model)
    parser.add_argument("--precision", default="int4", help="a dtype, or a format of the weights")
    parser.add_argument("--head", default="models/smollm2-135m-instruct-eagle3", help="folder of a draft head")
    parser.add_argument("--num-drafts", type=int, default=5, help="K")
    parser.add_argument("--lookup-min", type=int, default=3)
    parser.add_argument("--lookup-max", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser


def choose(lines: Sequence[PromptLine], count: int) -> list[PromptLine]:
    """As many of each category, as far as they go, each time the next one of the file."""
    by_category: dict[str, list[PromptLine]] = {}
    for line in lines:
        by_category.setdefault(category(line), []).append(line)
    turns = max(map(len, by_category.values()))
    return [found[turn] for turn in range(turns) for found in by_category.values() if turn < len(found)][:count]


def head_method(folder: str) -> str:
    """Of the head in a folder."""
    return open_head(Path(folder))[0].method


async def run(args: argparse.Namespace, lines: Sequence[PromptLine], head: str) -> dict[str, list[Asked]]:
    """The answers of each drafter.

    Args:
        head: method of the head.
    """
    prompts = encode(args.model, lines)
    turns = serve_in_turn(args, {"ngram": ("ngram",), head: (head,), f"ngram+{head}": ("ngram", head)}, {head: args.head})
    return {name: await _ask(Services(name, client), prompts, args) async for name, client, _ in turns}


def encode(model: str, lines: Sequence[PromptLine]) -> list[tuple[str, list[int]]]:
    """Categories and prompts, as chats."""
    tokenizer = Tokenizer.from_folder(resolve_model(model))
    return [(category(line), tokenizer.encode_chat([{"role": "user", "content": line.text}])) for line in lines]


async def serve_in_turn(
    args: argparse.Namespace, methods_by_name: Mapping[str, tuple[str, ...]], models: Mapping[str, str]
) -> AsyncIterator[tuple[str, AsyncClient, str]]:
    """Clients, and their addresses, of services that differ in their drafter: each may be used until the next one is asked for.

    Args:
        args: of `make_parser`.
        models: of the methods that have one.
    """
    numbers = {"dtype": args.precision} if args.precision in ("bfloat16", "float32") else {"weights": args.precision}
    with tempfile.TemporaryDirectory(prefix="specwire-bench-") as folder:
        verifier = VerifierConfig(
            listen=(f"unix:{folder}/verifier",), model=args.model, num_threads=args.threads, max_model_len=4096, kv_cache_memory=_CACHE_BYTES,
            features=(args.head,), speculative_config=SpeculativeConfig(num_speculative_tokens=args.num_drafts), **numbers,
        )  # fmt: skip
        log = Log()
        async with running(verifier, log=log):
            for name, methods in methods_by_name.items():
                lookup = {"prompt_lookup_min": args.lookup_min, "prompt_lookup_max": args.lookup_max} if "ngram" in methods else {}
                speculative = SpeculativeConfig(
                    method=methods if len(methods) > 1 else methods[0], model=next((models[method] for method in methods if method in models), None),
                    num_speculative_tokens=args.num_drafts, **lookup,
                )  # fmt: skip
                drafter = DrafterConfig(
                    listen=(f"unix:{folder}/{name}",), target_model=args.model, num_threads=args.threads, speculative_config=speculative
                )
                own = f"unix:{folder}/c-{name}"
                coordinator = CoordinatorConfig(
                    listen=(own,), verifiers=verifier.listen, drafters=drafter.listen, speculative_config=speculative,
                    min_draft_wait_ms=_STEPS_WAIT_MS,
                )  # fmt: skip
                async with running(drafter, log=log), running(coordinator, log=log), AsyncClient(own) as client:
                    await client.wait_ready()
                    await log.wait_for(f"drafter {drafter.listen[0]} is there", 0)
                    yield name, client, own


async def _ask(services: Services, prompts: Sequence[tuple[str, list[int]]], args: argparse.Namespace) -> list[Asked]:
    asked = [Asked(kind, prompt, []) for kind, prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for number in range(args.runs):
        waiting = iter(asked)

        async def serve_some() -> None:
            for one in waiting:  # noqa: B023 - awaited in this iteration
                one.runs.append(await services.decode(one.token_ids, params))

        await asyncio.gather(*[serve_some() for _ in range(args.concurrency)])
        print(f"{services.name}, run {number + 1}: {tokens_a_step([one.runs[-1] for one in asked]):.3f} tokens a step", flush=True)
    return asked


def tokens_a_step(decoded: Sequence[Decoded]) -> float:
    """Without the first token of each, which its prompt's step gives."""
    steps = sum(one.num_steps - 1 for one in decoded)
    return sum(len(one.token_ids) - 1 for one in decoded) / steps if steps else 1.0


def describe(asked: Sequence[Asked], number: int, names: Sequence[str]) -> dict[str, Any]:
    """One run of one drafter."""
    decoded = {name: [one.runs[number] for one in asked if one.category == name] for name in names}
    decoded[_ALL] = [one.runs[number] for one in asked]
    every = decoded[_ALL]
    return {
        "tokens_a_step": {name: round(tokens_a_step(found), 3) for name, found in decoded.items()},
        "drafted_steps": round(sum(one.num_drafts for one in every) / sum(one.num_steps - 1 for one in every), 3),
        "accepted_of_drafted": round(sum(one.num_accepted_tokens for one in every) / max(1, sum(one.num_draft_tokens for one in every)), 3),
        "num_drafts": sum(one.num_drafts for one in every),
        "num_tokens": sum(len(one.token_ids) for one in every),
    }


if __name__ == "__main__":
    main()
