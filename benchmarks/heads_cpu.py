"""What a call for drafts of a trained head costs on a CPU: heads in turns, CPU time of one thread.

python -m benchmarks.heads_cpu [--heads FOLDER ...] [--rounds 12]

Each call is one of `drafter_svc`'s, without services: the drafter's own sequences of 64 tokens, of which two are new at each call, with features of
zeros. CPU time, unlike time, says something on a busy machine, too, if less than on a quiet one: the least and the median of all calls are given.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lists_cpu import head_method
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from drafter_svc.draft_head import DraftHead
from drafter_svc.load_head import load_draft_head
from drafter_svc.method import MEASUREMENT_TENANT, Ask
from specwire.config import DrafterConfig, VerifierConfig
from specwire.messages import DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig

_MODELS = Path(__file__).parents[1] / "models"
_HEADS = [_MODELS / "smollm2-135m-instruct-eagle3", _MODELS / "smollm2-135m-instruct-dspark"]
_MOST = {"eagle3": 5, "dspark": 7}
"""Drafts that the committed heads were trained to make."""
_NUM_TOKENS, _NEW_TOKENS, _CALLS = 64, [11, 12], 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, nargs="+", default=_HEADS, help="folders")
    parser.add_argument("--model", default=VerifierConfig().model, help="their target")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    bystanders = Bystanders()
    results = measure(args.heads, args.model, args.rounds)
    print_table(list(results[0]), [[str(value) for value in row.values()] for row in results])
    figures = {"unit": "CPU ms of one thread for a call", "model": args.model, "rounds": args.rounds, "calls_a_round": _CALLS, "results": results}
    print(write_report("heads_cpu", figures, args.output, bystanders))


def measure(heads: Sequence[Path], model: str, num_rounds: int) -> list[dict[str, Any]]:
    """A row for each head, number of drafts, of sequences, and temperature."""
    rows, drafters = [], []
    for head in heads:
        method = head_method(str(head))
        most = _MOST.get(method, 5)
        spec = SpeculativeConfig.from_dict({"method": method, "model": str(head), "num_speculative_tokens": most})
        drafters.append(load_draft_head(DrafterConfig(num_threads=1, target_model=model, speculative_config=spec)))
        for k, num_seqs, temperature in itertools.product(sorted({1, 3, 5, most}), (1, 4), (0.0, 0.7)):
            rows.append((len(drafters) - 1, k, num_seqs, temperature))
    took_ms: dict[tuple[int, int, int, float], list[float]] = {row: [] for row in rows}
    for number in range(num_rounds + 1):
        for row in rows:
            which, k, num_seqs, temperature = row
            found = call_ms(drafters[which], k, num_seqs, temperature, number)
            if number:  # the first round warms up
                took_ms[row] += found
    return [
        {
            "head": heads[which].name, "drafts": k, "sequences": num_seqs, "temperature": temperature,
            "least": round(min(took_ms[row]), 2), "median": round(statistics.median(took_ms[row]), 2),
        }
        for row in rows
        for which, k, num_seqs, temperature in [row]
    ]  # fmt: skip


def call_ms(drafter: DraftHead, num_drafts: int, num_seqs: int, temperature: float, number: int) -> list[float]:
    """CPU ms of each of some calls, over sequences of their own.

    Args:
        number: of the round, whose tokens are like no other's.
    """
    for seq_id in range(num_seqs):
        tokens = [(7 * place + 31 * seq_id + 97 * number) % drafter.description.vocab_size for place in range(_NUM_TOKENS)]
        params = SamplingParams(temperature=temperature, seed=seq_id)
        drafter.open(seq_id, DraftOpen(seq_id, 0, tokens, _NUM_TOKENS, params, seq_id, tenant_cache_key=MEASUREMENT_TENANT))
    while drafter.catch_up(_NUM_TOKENS * num_seqs):
        pass
    took_ms = []
    for _ in range(_CALLS):
        for seq_id in range(num_seqs):
            drafter.append(seq_id, _NEW_TOKENS)
        started_s = time.process_time()
        drafts = drafter.propose([Ask(seq_id, num_drafts) for seq_id in range(num_seqs)])
        took_ms.append((time.process_time() - started_s) * 1e3)
        assert all(one.status is RowStatus.OK and len(one.token_ids) == num_drafts for one in drafts), f"{drafts}"
    for seq_id in range(num_seqs):
        drafter.close(seq_id)
    return took_ms


if __name__ == "__main__":
    main()
