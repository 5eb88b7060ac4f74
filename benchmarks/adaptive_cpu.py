"""Adaptive verification on a CPU beside no drafts and a fixed K: drafts of ngram or of a head, chat and copy-heavy prompts, one sequence and several.

python -m benchmarks.adaptive_cpu [--precision bfloat16|int4|...] [--concurrency 1 4 16] [--rounds 5] [--head FOLDER]

One verifier, one drafter and one coordinator for all of it, as processes; the policy is switched in the running coordinator. A window is all
prompts of a kind, closed loop, greedy: so many requests at once, the next one when one has ended. After an unmeasured window of each policy, in
which the prefix cache gets the prompts and the policy learns, windows of all policies take turns, in another order each round. A speed is tokens by
the time of the whole window; a ratio is the median of the rounds' ratios. The report also says how many drafts each window of the policy asked for.
There are twice as many requests as run at once, at least: with as many, none would follow another, and a window would be as long as its slowest
text, whatever the others gain.
"""

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cpu import Decoded, Services, read_prompts
from benchmarks.gpu.processes import Log, running
from benchmarks.gpu.switching import switch_policy
from benchmarks.lists_cpu import head_method
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from benchmarks.turns import family_cpu_s
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig
from specwire.engine.checkpoint import resolve_model
from specwire.messages import PolicyStatus
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.tokenizer import Tokenizer

KINDS = ("chat", "copy")
LEAST = {"chat": 0.97, "copy": 1.3}
"""What adaptive verification is to reach beside no drafts, by kind of prompts."""
LEAST_WITH_HEAD = {"chat": 1.5, "copy": 2.0}
"""With a head, weights in bfloat16, and one request at a time."""
_FULL_PRECISIONS = ("bfloat16", "float32")
_BFLOAT16 = ("bfloat16", "bf16")
_CACHE_BYTES = 512 << 20
"""Holds all prompts."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How many drafts: num_drafts for all, or as chosen up to as many."""

    name: str
    num_drafts: int
    is_adaptive: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """All prompts once with one policy."""

    decoded: list[Decoded]
    elapsed_s: float
    cpu_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.decoded)

    @property
    def num_steps(self) -> int:
        """Of all requests."""
        return sum(one.num_steps for one in self.decoded)

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True)
class Bench:
    """The running services, and what each prompt may bring."""

    services: Services
    client: AsyncClient
    switch: str
    max_num_seqs: int
    params: SamplingParams

    async def measure(self, policy: Policy, prompts: Sequence[list[int]], concurrency: int) -> Window:
        """Nothing else may run meanwhile."""
        await switch_policy(self.switch, [[1, self.max_num_seqs, policy.num_drafts]], is_adaptive=policy.is_adaptive)
        waiting = iter(enumerate(prompts))
        decoded: dict[int, Decoded] = {}

        async def serve_some() -> None:
            for index, prompt in waiting:
                decoded[index] = await self.services.decode(prompt, self.params)

        cpu_s, started_s = family_cpu_s(), time.perf_counter()
        await asyncio.gather(*[serve_some() for _ in range(concurrency)])
        return Window([decoded[index] for index in range(len(prompts))], time.perf_counter() - started_s, family_cpu_s() - cpu_s)


def main() -> None:
    args = make_parser().parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    rows = asyncio.run(run(args))
    print_table(
        ["prompts", "c", "policy", "tok/s", "beside none", "aim", "beside fixed", "CPU ms a token", "acceptance length", "drafted", "same texts"],
        [
            [
                row["prompts"], str(row["c"]), row["policy"], f"{row['tok_s']:.1f}", f"{row['beside_none']:.3f}", row["aim"],
                f"{row['beside_fixed']:.3f}", f"{row['cpu_ms_per_token']:.2f}", f"{row['acceptance_length']:.2f}", f"{row['drafted_rows']:.0%}",
                f"{row['same_texts']:.0%}",
            ]
            for row in rows
        ],
    )  # fmt: skip
    figures = {
        "unit": "tokens a second over a window, medians of the rounds; ratios of speeds, medians of the rounds' ratios",
        "model": args.model, "precision": args.precision, "head": args.head, "threads": args.threads, "rounds": args.rounds, "tokens": args.tokens,
        "num_drafts": args.num_drafts, "most_drafts": args.most_drafts, "results": rows,
    }  # fmt: skip
    name = "_".join(["adaptive_cpu", *([head_method(args.head)] if args.head else []), *([args.precision] if args.precision != "bfloat16" else [])])
    print(f"\nwritten to {write_report(name, figures, args.output, bystanders)}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=VerifierConfig().model)
    parser.add_argument("--precision", default="bfloat16", help="a dtype, or a format of the weights: int4")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of prompts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=72, help="most tokens of an answer")
    parser.add_argument("--num-drafts", type=int, default=5, help="K of the fixed policy")
    parser.add_argument("--most-drafts", type=int, default=8, help="ceiling of the adaptive one")
    parser.add_argument("--head", default="", help="folder of a head that drafts instead of ngram")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each kind of prompts, concurrency and policy."""
    policies = Policy("none", 0), Policy("fixed", args.num_drafts), Policy("adaptive", args.most_drafts, is_adaptive=True)
    most = max(args.num_drafts, args.most_drafts)
    ngram = SpeculativeConfig(
        method="ngram", num_speculative_tokens=most, prompt_lookup_min=2, prompt_lookup_max=4, enable_adaptive_verification=True
    )
    speculative = ngram
    if args.head:
        method = head_method(args.head)
        speculative = SpeculativeConfig(method=method, model=args.head, num_speculative_tokens=most, enable_adaptive_verification=True)
    numbers = {"dtype": args.precision} if args.precision in _FULL_PRECISIONS else {"weights": args.precision}
    max_num_seqs = max(16, *args.concurrency)
    tokenizer = Tokenizer.from_folder(resolve_model(args.model))
    rows = []
    with tempfile.TemporaryDirectory(prefix="specwire-bench-") as folder:
        verifier = VerifierConfig(
            listen=(f"unix:{folder}/verifier",), model=args.model, num_threads=args.threads, max_model_len=2048, max_num_seqs=max_num_seqs,
            kv_cache_memory=_CACHE_BYTES, speculative_config=speculative, **numbers,
        )  # fmt: skip
        drafter = DrafterConfig(
            listen=(f"unix:{folder}/drafter",), target_model=args.model if args.head else "", num_threads=args.threads, max_num_seqs=max_num_seqs,
            speculative_config=speculative,
        )  # fmt: skip
        own, switch, log = f"unix:{folder}/coordinator", f"{folder}/switch", Log()
        coordinator = CoordinatorConfig(listen=(own,), verifiers=verifier.listen, drafters=drafter.listen, speculative_config=speculative)
        command = ("benchmarks.gpu.switching", switch)
        async with running(verifier, log=log), running(drafter, log=log), running(coordinator, log=log, command=command), AsyncClient(own) as client:
            await client.wait_ready()
            await log.wait_for(f"drafter {drafter.listen[0]} is there", 0)
            bench = Bench(Services("services", client), client, switch, max_num_seqs, SamplingParams(temperature=0.0, max_tokens=args.tokens))
            for kind in args.kinds:
                texts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in read_prompts(kind)]
                for concurrency in args.concurrency:
                    prompts = [texts[index % len(texts)] for index in range(max(len(texts), 2 * concurrency))]
                    is_aim = args.head and args.precision in _BFLOAT16 and concurrency == 1
                    least = LEAST_WITH_HEAD if is_aim else LEAST
                    rows += await compare(bench, policies, kind, prompts, concurrency, args.rounds, least[kind])
    return rows


async def compare(
    bench: Bench, policies: Sequence[Policy], kind: str, prompts: Sequence[list[int]], concurrency: int, num_rounds: int, least: float
) -> list[dict[str, Any]]:
    """Rows of all policies, which take turns; adaptive verification is to reach `least` beside no drafts."""
    windows: dict[Policy, list[Window]] = {policy: [] for policy in policies}
    learned, beliefs = PolicyStatus(), list[dict[str, Any]]()
    for number in range(-1, num_rounds):
        first = number % len(policies)
        for policy in (*policies[first:], *policies[:first]):
            window = await bench.measure(policy, prompts, concurrency)
            if policy.is_adaptive:
                learned = (await bench.client.get_status()).lanes[0].policy
                beliefs.append(await switch_policy(bench.switch, [[1, bench.max_num_seqs, 0]], is_adaptive=False))
            if number >= 0:
                windows[policy].append(window)
        if number >= 0:
            speeds = ", ".join(f"{policy.name} {found[-1].tok_s:.1f}" for policy, found in windows.items())
            print(f"{kind}, {concurrency} at once: {speeds} tok/s", flush=True)
    none, fixed, _ = windows.values()
    rows = []
    for policy, found in windows.items():
        row = row_of(kind, concurrency, policy.name, found, none, fixed, least)
        if policy.is_adaptive:
            row |= {"prediction_error": learned.cost_error, "verify_factor": learned.verify_factor, "hop_factor": learned.hop_factor}
            row["verify_factors"] = beliefs[-1]["verify_factors"]
            row["requested_of_rounds"] = [  # steps by the drafts that were asked for
                [more - less for less, more in zip(before["requested"], after["requested"], strict=True)] for before, after in pairwise(beliefs)
            ]
        rows.append(row)
    return rows


def row_of(
    kind: str, concurrency: int, policy: str, found: Sequence[Window], none: Sequence[Window], fixed: Sequence[Window], least: float
) -> dict[str, Any]:
    """One line of the table.

    Args:
        found, none, fixed: windows of this policy, of no drafts and of the fixed K, by round.
        least: what adaptive verification is to reach beside no drafts.
    """
    decoded = [one for window in found for one in window.decoded]
    plain = [one for window in none for one in window.decoded]
    num_drafts, num_steps = sum(one.num_drafts for one in decoded), sum(one.num_steps for one in decoded)
    beside_none = _ratio(found, none)
    return {
        "prompts": kind,
        "c": concurrency,
        "policy": policy,
        "tok_s": round(statistics.median(window.tok_s for window in found), 2),
        "beside_none": beside_none,
        "aim": f">= {least:g}" if policy == "adaptive" else "",
        "is_met": beside_none >= least if policy == "adaptive" else None,
        "beside_fixed": _ratio(found, fixed),
        "cpu_ms_per_token": round(statistics.median(1e3 * window.cpu_s / window.num_tokens for window in found), 3),
        "acceptance_length": round(1 + sum(one.num_accepted_tokens for one in decoded) / num_drafts, 3) if num_drafts else 1.0,
        "tokens_per_row": round(sum(len(one.token_ids) for one in decoded) / num_steps, 3),
        "drafts_per_row": round(sum(one.num_draft_tokens for one in decoded) / num_steps, 3),
        "drafted_rows": round(num_drafts / num_steps, 3),
        "same_texts": sum(a.token_ids == b.token_ids for a, b in zip(decoded, plain, strict=True)) / len(decoded),
        "tok_s_of_rounds": [round(window.tok_s, 2) for window in found],
        "tokens_per_row_of_rounds": [round(window.num_tokens / window.num_steps, 3) for window in found],
    }


def _ratio(found: Sequence[Window], beside: Sequence[Window]) -> float:
    return round(statistics.median(ours.tok_s / other.tok_s for ours, other in zip(found, beside, strict=True)), 4)


if __name__ == "__main__":
    main()
