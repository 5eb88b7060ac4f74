"""Decoding on a CPU: through all services beside `transformers`, and with ngram drafts beside our own plain decoding.

python -m benchmarks.cpu

Verifier, coordinator, drafter and client are processes of their own, as `specwire up` starts them; one sequence at a time, greedy. A time is
the client's: from its first tokens to its last, divided by the tokens between. Everything that is compared runs in turns.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.cli.up import free_port
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig, UpConfig, VerifierConfig
from specwire.engine.checkpoint import resolve_model
from specwire.launch import Supervisor
from specwire.process import MODEL_ENVIRONMENT
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.stack.plan import StackOptions, plan_stack, without_drafters
from specwire.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
_NUM_PROMPT_TOKENS = 64
_NUM_PLAIN_PROMPTS = 3
logger = logging.getLogger(__name__)


class Decoded(NamedTuple):
    """One generation: its tokens, and the time from the first tokens that came to the last."""

    token_ids: list[int]
    num_timed_tokens: int
    decode_s: float
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0


Decode = Callable[[list[int], SamplingParams], Awaitable[Decoded]]


@dataclass(frozen=True, slots=True)
class Contender:
    """One of those that are compared, and all that it generated: rounds of prompts."""

    name: str
    decode: Decode
    rounds: list[list[Decoded]]

    @property
    def ms_per_token(self) -> float:
        """Median over the rounds of the time of all prompts by their tokens."""
        return statistics.median(ms_per_token(round_) for round_ in self.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--ngram-dtypes", nargs="*", default=["bfloat16"], help="dtypes to compare ngram and plain decoding in")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model, ours and theirs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for cpu.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    results: list[dict[str, Any]] = []
    for dtype in dict.fromkeys([*args.dtypes, *args.ngram_dtypes]):
        results += asyncio.run(measure(dtype, args))
    print_table(
        ["", "dtype", "ms a token", "beside", "ms a token", "ratio", "promised", "acceptance length", "drafted steps", "same tokens"],
        [
            [
                r["name"], r["dtype"], f"{r['ms_per_token']:.2f}", r["beside"], f"{r['beside_ms_per_token']:.2f}", f"{r['ratio']:.3f}",
                r["promised"], f"{r['acceptance_length']:.2f}", f"{r['drafted_steps']:.0%}", f"{r['same_tokens']:.0%}",
            ]
            for r in results
        ],
    )  # fmt: skip
    figures = {
        "unit": "ms a token at the client, without the first tokens; medians of the rounds",
        "model": VerifierConfig().model, "threads": args.threads, "rounds": args.rounds, "results": results,
    }  # fmt: skip
    print(f"\nwritten to {write_report('cpu', figures, args.output, bystanders)}")


async def measure(dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both comparisons in one dtype, as far as they were asked for."""
    folder = resolve_model(VerifierConfig().model)
    tokenizer = Tokenizer.from_folder(folder)
    results = []
    async with serve(dtype, args.threads, num_drafters=0) as plain:
        if dtype in args.dtypes:
            texts = [tokenizer.encode(text) for text in read_prompts("copy")]
            prompts = [ids[:_NUM_PROMPT_TOKENS] for ids in texts][:_NUM_PLAIN_PROMPTS]
            params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
            async with start_transformers(folder, dtype, args.threads) as worker:
                ours, theirs = await compare(plain, worker, prompts, params, args.rounds)
            ratio = statistics.median(round_ratios(ours, theirs))
            results.append(result("plain", dtype, ours, theirs, ratio, "<= 0.8" if dtype == "bfloat16" else ""))
        if dtype in args.ngram_dtypes:
            async with serve(dtype, args.threads, num_drafters=1) as ngram:
                params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
                for name, promised in (("copy", ">= 1.5"), ("chat", ">= 0.95")):
                    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in read_prompts(name)]
                    drafted, alone = await compare(ngram, plain, prompts, params, args.rounds)
                    ratio = statistics.median(round_ratios(alone, drafted))
                    results.append(result(f"ngram, {name}", dtype, drafted, alone, ratio, promised if dtype == "bfloat16" else ""))
    return results


async def compare(
    first: "Services | Worker", second: "Services | Worker", prompts: Sequence[list[int]], params: SamplingParams, num_rounds: int
) -> tuple[Contender, Contender]:
    """Every prompt once to warm up, then in each round once with both, who begins being swapped."""
    contenders = Contender(first.name, first.decode, []), Contender(second.name, second.decode, [])
    for number in range(-1, num_rounds):
        done: dict[str, list[Decoded]] = {contender.name: [] for contender in contenders}
        for index, prompt in enumerate(prompts):
            for contender in contenders if (number + index) % 2 else reversed(contenders):
                done[contender.name].append(await contender.decode(prompt, params))
        if number >= 0:
            for contender in contenders:
                contender.rounds.append(done[contender.name])
            print(", ".join(f"{c.name} {ms_per_token(c.rounds[-1]):.2f} ms a token" for c in contenders), flush=True)
    return contenders


class Services:
    """Our services, through the SDK."""

    def __init__(self, name: str, client: AsyncClient) -> None:
        self.name = name
        self._client = client

    async def decode(self, prompt: list[int], params: SamplingParams) -> Decoded:
        token_ids: list[int] = []
        num_first, first_s, last_s, spec = 0, 0.0, 0.0, None
        async with self._client.stream(prompt, params) as stream:
            async for event in stream:
                last_s = time.perf_counter()
                token_ids += event.token_ids
                if not num_first:
                    num_first, first_s = len(event.token_ids), last_s
                spec = event.spec or spec
        assert spec is not None, "the last event has statistics"
        stats = spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens, spec.num_steps
        return Decoded(token_ids, len(token_ids) - num_first, last_s - first_s, *stats)


class Worker:
    """Something else that generates, in a process of its own: a JSON object a line in, one out, `{"ready": true}` first."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    async def decode(self, prompt: list[int], params: SamplingParams) -> Decoded:
        assert params.ignore_eos, "answers of different lengths would not be comparable"
        answer = await self.ask({"prompt": prompt, "num_tokens": params.max_tokens})
        token_ids, times = answer["token_ids"], answer["times"]
        assert len(times) == len(token_ids), f"{len(token_ids)} tokens came in {len(times)} pieces"
        return Decoded(token_ids, len(token_ids) - 1, times[-1] - times[0], num_steps=len(token_ids))

    async def ask(self, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """The worker's next line, after sending a request."""
        assert self._process.stdin is not None, "the worker is started with pipes"
        assert self._process.stdout is not None, "the worker is started with pipes"
        if request is not None:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, f"the worker of {self.name} has ended"
        return json.loads(line)


def start_transformers(folder: Path, dtype: str, num_threads: int) -> contextlib.AbstractAsyncContextManager[Worker]:
    """`generate` of transformers with its defaults."""
    return start_worker("transformers", *module_command("benchmarks.transformers_worker", str(folder), dtype, str(num_threads)))


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs a module in this environment; it ends with this process."""
    return [sys.executable, "-m", "specwire.child", str(os.getpid()), module, *arguments]


@contextlib.asynccontextmanager
async def start_worker(name: str, *command: str) -> AsyncIterator[Worker]:
    """Its threads wait for each other as those of our model services do."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24, env={**dict(MODEL_ENVIRONMENT), **os.environ}
    )
    try:
        worker = Worker(name, process)
        await worker.ask()
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def serve(precision: str, num_threads: int, num_drafters: int, num_drafts: int = 5, *, is_adaptive: bool = False) -> AsyncIterator[Services]:
    """All services as processes, stopped at the end: with an ngram drafter (lookup 2 to 4), or plain.

    Args:
        precision: a dtype, or a format of the weights.
        num_drafts: K, or its ceiling where it is adaptive.
        is_adaptive: each step's K is chosen.
    """
    numbers = {"dtype": precision} if precision in ("bfloat16", "float32") else {"weights": precision}
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_min=2,
        prompt_lookup_max=4,
        enable_adaptive_verification=is_adaptive,
    )
    verifier = VerifierConfig(**numbers, num_threads=num_threads, max_model_len=2048, kv_cache_memory=128 << 20, speculative_config=speculative)
    drafter = DrafterConfig(max_num_seqs=verifier.max_num_seqs, speculative_config=speculative)
    coordinator = CoordinatorConfig(listen=(f"127.0.0.1:{free_port(0)}",), speculative_config=speculative)
    options = StackOptions(UpConfig(), verifier, (drafter,) * num_drafters, coordinator, http=None)
    with tempfile.TemporaryDirectory(prefix="specwire-bench-") as folder:
        stack = plan_stack(options if num_drafters else without_drafters(options), Path(folder))
        supervisor = Supervisor(stack.groups(), lambda name, line: logger.log(_level(line), "%s: %s", name, line))
        try:
            await supervisor.start()
            async with AsyncClient(stack.address) as client:
                await client.wait_ready()
                yield Services(("adaptive" if is_adaptive else "ngram") if num_drafters else "plain", client)
        finally:
            await supervisor.stop()


def read_prompts(name: str) -> list[str]:
    return [json.loads(line)["turns"][0] for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def ms_per_token(decoded: Sequence[Decoded]) -> float:
    return 1e3 * sum(one.decode_s for one in decoded) / sum(one.num_timed_tokens for one in decoded)


def round_ratios(first: Contender, second: Contender) -> list[float]:
    """The first one's time over the second one's, of each round."""
    return [ms_per_token(a) / ms_per_token(b) for a, b in zip(first.rounds, second.rounds, strict=True)]


def result(name: str, dtype: str, ours: Contender, beside: Contender, ratio: float, promised: str) -> dict[str, Any]:
    """One line of the table; `ratio` is the median of the rounds' ratios."""
    last = ours.rounds[-1]
    num_drafts, num_steps = sum(one.num_drafts for one in last), sum(one.num_steps for one in last)
    same = [a.token_ids == b.token_ids for a, b in zip(last, beside.rounds[-1], strict=True)]
    return {
        "name": name,
        "dtype": dtype,
        "ms_per_token": round(ours.ms_per_token, 3),
        "beside": beside.name,
        "beside_ms_per_token": round(beside.ms_per_token, 3),
        "ratio": round(ratio, 4),
        "promised": promised,
        "acceptance_length": round(1 + sum(one.num_accepted_tokens for one in last) / num_drafts, 3) if num_drafts else 1.0,
        "tokens_per_step": round(sum(len(one.token_ids) for one in last) / num_steps, 3),
        "drafted_steps": round(num_drafts / num_steps, 3),
        "same_tokens": sum(same) / len(same),
        "num_tokens": [len(one.token_ids) for one in last],
        "ms_per_token_of_rounds": [round(ms_per_token(round_), 3) for round_ in ours.rounds],
        "beside_ms_per_token_of_rounds": [round(ms_per_token(round_), 3) for round_ in beside.rounds],
        "ratio_of_prompts": [round(_prompt_ratio(ours, beside, index), 3) for index in range(len(last))],
    }


def _prompt_ratio(ours: Contender, beside: Contender, index: int) -> float:
    """Time per token beside ours, of one prompt over all rounds."""
    return ms_per_token([round_[index] for round_ in beside.rounds]) / ms_per_token([round_[index] for round_ in ours.rounds])


def _level(line: str) -> int:
    return logging.DEBUG if " INFO " in line else logging.WARNING


if __name__ == "__main__":
    main()
