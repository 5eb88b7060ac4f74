"""Which `draft_sharpness` is best for a head: its drafts, drawn with the noise of the answers, at several factors.

python -m benchmarks.sharpness --prompts PROMPTS.jsonl.gz [--check OTHERS.jsonl.gz] [--head FOLDER] [--num-prompts 20]

The target answers the prompts once at each temperature, with the noise of served requests. Then the head drafts behind every token of the answers, as
a server would draft there, once for each factor: from the same features and noise, so that factors are compared draft by draft. Greedy drafts do
not depend on it. The best factor is chosen by the first file; the second one says what it brings on prompts that it was not chosen by.
"""

import argparse
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench_answers import Answers, make_answers
from benchmarks.gpu.bench_heads import accepted_drafts, head_drafts, row_offsets, walk_rows
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL
from specwire.engine.runner import set_num_threads
from specwire.tokenizer import Tokenizer
from specwire.train.batches import BatchSource
from specwire.train.deadline import Deadline
from specwire.train.stored import Stored, load_stored
from specwire.train.target import Target

logger = logging.getLogger(__name__)

FACTORS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)
_LEAST_GAIN = 0.01
"""Of tokens a step, over all temperatures: less is not worth a field in a head's configuration."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file that the factor is chosen by")
    parser.add_argument("--check", type=Path, help="JSONL file of other prompts")
    parser.add_argument("--head", default="models/smollm2-135m-instruct-eagle3", help="folder of a head that `specwire train` made")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="target")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=20, help="of each file")
    parser.add_argument("--max-prompt", type=int, default=512, help="most tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--factors", type=float, nargs="+", default=list(FACTORS), help="1 is among them in any case")
    parser.add_argument("--keep", type=Path, help="folder where answers are kept, and taken from at the next run")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    bystanders = Bystanders()
    set_num_threads(args.threads)
    target = Target(resolve_model(args.model), getattr(torch, args.dtype), torch.device(args.device))
    stored, factors = load_stored(Path(args.head), target), sorted({1.0, *args.factors})
    tuned = measure(target, stored, args.prompts, factors, args)
    best = max(tuned, key=lambda row: row["mean"]["tokens_a_step"])["factor"]
    figures: dict[str, Any] = {"head": Path(args.head).name, "most_drafts": stored.num_drafts, "chosen_by": tuned, "best_factor": best}
    if args.check:
        figures["checked_by"] = measure(target, stored, args.check, factors, args)
    figures["gain"] = {name: gain(rows, best) for name, rows in figures.items() if name in ("chosen_by", "checked_by")}
    figures["pays"] = min(figures["gain"].values()) >= _LEAST_GAIN
    for name in figures["gain"]:
        _print(name, figures[name])
    logger.info("best factor %g, gain %s: it %s", best, figures["gain"], "pays" if figures["pays"] else "does not pay")
    print(write_report("sharpness", figures, args.output, bystanders))


def gain(rows: Sequence[dict[str, Any]], factor: float) -> float:
    """Of tokens a step beside no sharpening, mean of the temperatures."""
    by_factor = {row["factor"]: row["mean"]["tokens_a_step"] for row in rows}
    return round(by_factor[factor] / by_factor[1.0] - 1, 4)


def measure(target: Target, stored: Stored, prompts: Path, factors: Sequence[float], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each factor."""
    started = time.monotonic()
    answers = sampled(read_answers(target, prompts, args))
    logger.info("%d answers of %s after %.0f s", len(answers.prompt_lens), prompts.name, time.monotonic() - started)
    source = BatchSource(target, answers.sequences, stored.feature_layers)
    if source.fits:
        source.keep(lambda done, total: None)
        logger.info("features after %.0f s", time.monotonic() - started)
    accepted = {}
    for factor in factors:
        drafts = head_drafts(replace(stored, sharpness=factor), target, answers, Deadline(0), lambda share: None, source)
        accepted[factor] = accepted_drafts(answers, drafts.tokens)
        logger.info("factor %g after %.0f s", factor, time.monotonic() - started)
    return [{"factor": factor} | describe(answers, accepted[factor], accepted[1.0]) for factor in factors]


def read_answers(target: Target, prompts: Path, args: argparse.Namespace) -> Answers:
    """Those that were kept, or new ones."""
    kept = args.keep and args.keep / f"answers-{prompts.name.partition('.')[0]}-{args.num_prompts}-{args.max_prompt}-{args.tokens}.npz"
    if kept and kept.is_file():
        return Answers.load(kept)
    tokenizer = Tokenizer.from_folder(target.folder)
    answers = make_answers(
        target, tokenizer, prompts, lambda share: None, max_new=args.tokens, num_prompts=args.num_prompts, max_prompt=args.max_prompt
    )
    if kept:
        args.keep.mkdir(parents=True, exist_ok=True)
        answers.save(kept)
    return answers


def sampled(answers: Answers) -> Answers:
    """Those whose temperature is not 0."""
    chosen = np.flatnonzero(answers.temperatures > 0)
    parts = [answers.tokens[answers.starts[row] : answers.starts[row + 1]] for row in chosen]
    starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
    rows = {name: getattr(answers, name)[chosen] for name in ("prompt_lens", "temperatures", "keys", "categories", "loops")}
    return Answers(tokens=np.concatenate(parts), starts=starts, **rows)


def describe(answers: Answers, accepted: np.ndarray, plain: np.ndarray) -> dict[str, dict[str, float]]:
    """By temperature, and the means: tokens a step of walks through the answers; accepted drafts behind every token, what sharpening adds to
    them, and that difference's standard error over the answers."""
    offsets, tokens = row_offsets(answers), np.diff(row_offsets(answers))
    steps = np.array([len(rows) for rows in walk_rows(answers, accepted)])
    gains = np.array([(accepted[a:b] - plain[a:b]).sum() for a, b in itertools.pairwise(offsets)])
    result: dict[str, dict[str, float]] = {}
    for temperature in sorted(set(answers.temperatures.tolist())):
        here = answers.temperatures == np.float32(temperature)
        count = tokens[here].sum()
        rows = np.repeat(here, tokens)
        result[f"t{temperature:.3g}"] = {
            "tokens_a_step": round(float(count / steps[here].sum()), 4),
            "accepted_behind_each_token": round(float(accepted[rows].mean()), 4),
            "more_than_plain": round(float(gains[here].sum() / count), 4),
            "standard_error": round(float(np.sqrt(((gains[here] - tokens[here] * gains[here].sum() / count) ** 2).sum()) / count), 4),
            "tokens": int(count),
        }
    parts = list(result.values())
    return result | {
        "mean": {name: round(float(np.mean([part[name] for part in parts])), 4) for name in ("tokens_a_step", "accepted_behind_each_token")}
    }


def _print(name: str, rows: Sequence[dict[str, Any]]) -> None:
    temperatures = [key for key in rows[0] if key.startswith("t")]
    print_table(
        [name, *[f"{key} {column}" for key in temperatures for column in ("tokens a step", "more accepted", "+-")], "mean"],
        [
            [
                f"{row['factor']:g}",
                *[f"{row[key][column]:.3f}" for key in temperatures for column in ("tokens_a_step", "more_than_plain", "standard_error")],
                f"{row['mean']['tokens_a_step']:.3f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
