"""Does the advice of `specwire advise` hold? Throughput of a running stack with every fixed K, beside the K that the advice gives.

specwire advise --prompts prompts.jsonl --chat --output advice
python -m benchmarks.advise --prompts prompts.jsonl --chat --advice advice/advice.json --name advise_chat

The stack is the one that was measured: every K is asked for by the requests themselves (`max_draft_tokens`), in turns, at each number of requests at
once. The schedule's K at such a batch size is one of them, so that following it means to take that one.
"""

import argparse
import asyncio
import json
import logging
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.bench.backend import grpc_backend
from specwire.bench.metrics import measure
from specwire.bench.runner import LoadGenerator
from specwire.bench.targets import connect
from specwire.bench.workload import Prompt, file_prompts, read_prompt_file, repeat
from specwire.client import AsyncClient
from specwire.config import DEFAULT_ADDRESS
from specwire.errors import SpecwireError
from specwire.policy.schedule import dense_schedule
from specwire.sampling_params import SamplingParams

BAR = 0.97
"""Throughput of the advised K by that of the best one."""
logger = logging.getLogger(__name__)


async def sweep(arguments: argparse.Namespace, most: int) -> dict[int, list[list[float]]]:
    """Tokens a second by number of requests at once, K and repeat."""
    async with AsyncClient(arguments.address) as client:
        tokenizer = await connect(client, 30.0)
        if tokenizer is None:
            raise SpecwireError("the coordinator serves no tokenizer")
        prompts = file_prompts(read_prompt_file(arguments.prompts), tokenizer, arguments.output_len, as_chat=arguments.chat)
        found: dict[int, list[list[float]]] = {}
        for concurrency in arguments.concurrency:
            rates: list[list[float]] = [[] for _ in range(most + 1)]
            load = repeat(prompts, max(arguments.min_requests, arguments.waves * concurrency))
            for number in range(arguments.repeats + 1):
                # Another order each time, so that none always follows the same one.
                for k in range(most + 1) if number % 2 else reversed(range(most + 1)):
                    rate = await throughput(client, load, concurrency, k)
                    if number:  # the first round only warms up
                        rates[k].append(rate)
            found[concurrency] = rates
            logger.info("%d at once: %s", concurrency, ", ".join(f"{statistics.median(rate):.1f}" for rate in rates))
        return found


async def throughput(client: AsyncClient, load: list[Prompt], concurrency: int, k: int) -> float:
    """Tokens a second of a closed loop."""
    params = SamplingParams(temperature=0.0, max_draft_tokens=k)
    send = grpc_backend(client, params, label=f"sweep-{secrets.token_hex(4)}")
    run = await LoadGenerator(send, time.perf_counter, max_concurrency=concurrency).run(load, None)
    metrics = measure(run, (50.0,))
    if metrics.num_failed:
        raise SpecwireError(f"{metrics.num_failed} requests failed: {metrics.errors}")
    return metrics.output_throughput


def compare(advice: dict[str, Any], rates: dict[int, list[list[float]]], num_lanes: int) -> list[dict[str, Any]]:
    """Each number of requests at once: medians by K, the best K, the advised one, and the ratio of the two."""
    most = len(advice["tokens_per_step_by_k"]) - 1
    rows = []
    for concurrency, by_k in rates.items():
        size = -(-concurrency // num_lanes)
        table = dense_schedule(advice["num_speculative_tokens_per_batch_size"], most, max(size, 1)) if most else [0] * (size + 1)
        medians = [statistics.median(values) for values in by_k]
        best = max(range(len(medians)), key=medians.__getitem__)
        rows.append({
            "concurrency": concurrency, "tokens_per_s_by_k": medians, "repeats_by_k": by_k, "best_k": best, "advised_k": table[size],
            "of_best": medians[table[size]] / medians[best], "of_none": medians[table[size]] / medians[0],
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--advice", type=Path, required=True, help="advice.json")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lanes", type=int, default=1, help="verifiers, over which requests are spread")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--waves", type=int, default=2, help="requests = waves x concurrency")
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="advise")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    bystanders, advice = Bystanders(), json.loads(arguments.advice.read_text(encoding="utf-8"))
    rates = asyncio.run(sweep(arguments, len(advice["tokens_per_step_by_k"]) - 1))
    rows = compare(advice, rates, arguments.lanes)
    print_table(
        ["at once", "tokens/s by K", "best K", "advised K", "of the best", "of none"],
        [
            [str(row["concurrency"]), " ".join(f"{rate:.1f}" for rate in row["tokens_per_s_by_k"]), str(row["best_k"]), str(row["advised_k"]),
             f"{row['of_best']:.3f}", f"{row['of_none']:.3f}"]
            for row in rows
        ],
    )  # fmt: skip
    worst = min(row["of_best"] for row in rows)
    figures = {"prompts": arguments.prompts.name, "advice": advice["headline"], "bar": BAR, "worst_of_best": worst, "sizes": rows}
    path = write_report(arguments.name, figures, arguments.results, bystanders)
    print(f"{'holds' if worst >= BAR else 'DOES NOT HOLD'}: at worst {worst:.3f} of the best fixed K (bar {BAR}); {path}")


if __name__ == "__main__":
    main()
