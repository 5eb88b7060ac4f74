"""Decoding on a CPU with 4-bit weights beside llama.cpp, with the same GGUF file and as many threads; and with ngram drafts, beside both.

LLAMA_CPP_PYTHON=FOLDER/bin/python python -m benchmarks.llama_cpp

Ours through all services, as processes; llama.cpp through llama-cpp-python in a process of its own, which needs an environment of its own:

python -m venv FOLDER && FOLDER/bin/pip install llama-cpp-python    # compiles it, some minutes

One sequence at a time, greedy. A time is the client's: from its first tokens to its last, divided by the tokens between. A verify step is a
pass of the engine over six tokens of one sequence with the logits of all. Everything that is compared runs in turns: with drafts our services
with fixed K, those that choose K, those without drafts, and llama.cpp, which generates as many tokens as we do.
"""

import argparse
import asyncio
import logging
import os
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.cpu import Contender, Services, Worker, compare, module_command, read_prompts, result, round_ratios, serve, start_worker
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from benchmarks.turns import compare_all
from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL, default_model_file
from specwire.sampling_params import SamplingParams
from specwire.tokenizer import Tokenizer

_WORKER = Path(__file__).parent / "llama_cpp_worker.py"
_NUM_PROMPT_TOKENS = 64
_NUM_PLAIN_PROMPTS = 3
_VERIFY_TOKENS = 6
_VERIFY_REPEATS = 10
_NAME = "llama.cpp"
_PYTHON = "LLAMA_CPP_PYTHON"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="int4", help="format of our weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model, ours and theirs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--num-drafts", type=int, default=5, help="K of the comparison with ngram drafts")
    parser.add_argument("--most-drafts", type=int, default=8, help="ceiling where K is chosen; 0 = leave that out")
    parser.add_argument("--parts", nargs="+", choices=["verify", "plain", "ngram"], default=["verify", "plain", "ngram"])
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for llama_cpp.json")
    args = parser.parse_args()
    if _PYTHON not in os.environ:
        parser.error(f"{_PYTHON} is not set; it names the interpreter of an environment with llama-cpp-python")
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    results, verify = asyncio.run(measure(args))
    print_table(
        ["", "ms a token", "CPU ms", "beside", "ms a token", "CPU ms", "speed ratio", "aim", "acceptance length", "drafted steps", "same tokens"],
        [
            [
                r["name"], f"{r['ms_per_token']:.2f}", _cpu_ms(r), r["beside"], f"{r['beside_ms_per_token']:.2f}", _cpu_ms(r, "beside_"),
                f"{r['ratio']:.3f}", r["promised"], f"{r['acceptance_length']:.2f}", f"{r['drafted_steps']:.0%}", f"{r['same_tokens']:.0%}",
            ]
            for r in results
        ],
    )  # fmt: skip
    if verify:
        print(
            f"\nverify step of {_VERIFY_TOKENS} tokens: {verify['ms']:.2f} ms, {_NAME} {verify['beside_ms']:.2f} ms: {verify['ratio']:.2f} x (<= 0.7)"
        )
    figures = {
        "unit": "ms a token at the client, without the first tokens; medians of the rounds; a ratio is a speed over the other's; CPU ms are those of "
        "all processes of a contender, with the client's where it is ours",
        "model": DEFAULT_MODEL, "weights": args.weights, "threads": args.threads, "rounds": args.rounds, "num_drafts": args.num_drafts,
        "most_drafts": args.most_drafts, "results": results, "verify_step": verify,
    }  # fmt: skip
    print(f"written to {write_report('llama_cpp', figures, args.output, bystanders)}")


def _cpu_ms(figures: dict[str, Any], prefix: str = "") -> str:
    value = figures.get(f"{prefix}cpu_ms_per_token")
    return "" if value is None else f"{value:.2f}"


async def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results beside llama.cpp and with drafts, and the verify step's."""
    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_folder(folder)
    texts = [tokenizer.encode(text) for text in read_prompts("copy")]
    prompts = [ids[:_NUM_PROMPT_TOKENS] for ids in texts][:_NUM_PLAIN_PROMPTS]
    threads = str(args.threads)
    results: list[dict[str, Any]] = []
    verify: dict[str, Any] = {}
    async with start_worker(_NAME, os.environ[_PYTHON], "-P", str(_WORKER), str(default_model_file()), threads) as theirs:
        if "verify" in args.parts:
            async with start_worker("engine", *module_command("benchmarks.engine_worker", str(folder), args.weights, threads)) as engine:
                verify = await compare_verify(engine, theirs, prompts[0], args.rounds)
                verify["read_gb_s"] = round(max((await engine.ask({"read": 5}))["gb_s"]), 1)
        async with serve(args.weights, args.threads, num_drafters=0) as plain:
            if "plain" in args.parts:
                params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
                ours, beside = await compare(plain, theirs, prompts, params, args.rounds)
                results.append(result("plain", args.weights, ours, beside, _speed_ratio(ours, beside), ">= 1.0"))
            if "ngram" in args.parts:
                results += await compare_ngram(plain, theirs, tokenizer, args)
    return results, verify


async def compare_ngram(plain: Services, theirs: Worker, tokenizer: Tokenizer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Copy-heavy prompts with ngram drafts beside our plain decoding and beside llama.cpp's, in the same rounds."""
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in read_prompts("copy")]
    async with AsyncExitStack() as stack:
        drafting: list[Services] = [await stack.enter_async_context(serve(args.weights, args.threads, 1, args.num_drafts))]
        if args.most_drafts:
            drafting.append(await stack.enter_async_context(serve(args.weights, args.threads, 1, args.most_drafts, is_adaptive=True)))
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
        timed = await compare_all([*drafting, plain, theirs], prompts, params, args.rounds)
    *drafted, alone, beside = timed
    pairs: Sequence[tuple[Any, Any]] = [(one, other) for one in drafted for other in (alone, beside)] + [(alone, beside)]
    return [
        result(f"{ours.contender.name}, copy", args.weights, ours.contender, other.contender, _speed_ratio(ours.contender, other.contender), aim)
        | {"cpu_ms_per_token": ours.cpu_ms_per_token, "beside_cpu_ms_per_token": other.cpu_ms_per_token}
        for (ours, other), aim in zip(pairs, [">= 1.5"] * (len(pairs) - 1) + [""], strict=True)
    ]


async def compare_verify(engine: Worker, theirs: Worker, prompt: list[int], num_rounds: int) -> dict[str, Any]:
    """Times of a verify step in ms, and ours over theirs, as medians of the rounds."""
    request = {"prompt": prompt, "verify": _VERIFY_TOKENS, "repeats": _VERIFY_REPEATS}
    times: dict[str, list[float]] = {worker.name: [] for worker in (engine, theirs)}
    for _ in range(num_rounds):
        for worker in (engine, theirs):
            times[worker.name].append(statistics.median((await worker.ask(request))["ms"]))
    ratios = [a / b for a, b in zip(times[engine.name], times[theirs.name], strict=True)]
    return {
        "num_tokens": _VERIFY_TOKENS,
        "ms": statistics.median(times[engine.name]),
        "beside_ms": statistics.median(times[theirs.name]),
        "ratio": round(statistics.median(ratios), 4),
        "promised": "<= 0.7",
        "ms_of_rounds": times[engine.name],
        "beside_ms_of_rounds": times[theirs.name],
    }


def _speed_ratio(ours: Contender, beside: Contender) -> float:
    return statistics.median(round_ratios(beside, ours))


if __name__ == "__main__":
    main()
