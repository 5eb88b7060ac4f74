"""What trained heads and lookups are worth on benchmark prompts: drafts are walked through the target's own answers as a server would.

`python -m benchmarks.gpu.bench_heads FOLDER` counts again from the files of drafts in a folder that `benchmarks.gpu.train_heads` wrote.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench_answers import TEMPERATURES, Answers
from drafter_svc.method import Ask
from drafter_svc.ngram import longest_suffix_match
from drafter_svc.suffix import Suffix
from drafter_svc.suffix_match import Limits
from specwire.messages import DraftOpen
from specwire.sampling_params import SamplingParams
from specwire.train.batches import BatchSource, plan_batches
from specwire.train.calibration import area_under_curve, calibration_error, sigmoid
from specwire.train.deadline import Deadline
from specwire.train.stored import Stored
from specwire.train.target import Target

_TOKENS_AT_ONCE = 4096
_LOOKUPS = {"ngram": (1, 3), "ngram-2-4": (2, 4), "ngram-3-4": (3, 4)}
_IN_COMBINATION = "ngram-3-4"
_NUM_LOOKUP_DRAFTS = 5


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of one drafter, behind each token of the answers but the last: position p of sequence n is row offsets[n] + p - prompt_lens[n].

    Attributes:
        tokens: [P, K] int32, -1 where none is drafted.
        scores: [P, K] float32, probability of acceptance if those before it are, by the drafter.
    """

    tokens: np.ndarray
    scores: np.ndarray


def head_drafts(
    stored: Stored, target: Target, answers: Answers, deadline: Deadline, on_share: Callable[[float], None], source: BatchSource | None = None
) -> Drafts:
    """Drafts of a head behind all tokens of all answers.

    Args:
        source: of the answers, where their features are wanted more than once.

    Raises:
        TimeUp: the deadline came first.
    """
    sequences = answers.sequences
    source = source or BatchSource(target, sequences, stored.feature_layers)
    offsets = row_offsets(answers)
    tokens = np.full((offsets[-1], stored.num_drafts), -1, dtype=np.int32)
    log_odds = np.zeros(tokens.shape, dtype=np.float32)
    plan = plan_batches(sequences.lengths, _TOKENS_AT_ONCE, source.pad_to, np.random.default_rng(0))
    for number, rows in enumerate(plan):
        deadline.check()
        batch = source.batch(rows)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            drafted = stored.head.drafts(batch, answers.noise(rows, target.device).sharpened(stored.sharpness))
        drafted_tokens, signals = drafted.tokens.int().cpu().numpy(), drafted.signals[..., 0].float().cpu().numpy()
        for index, row in enumerate(rows.tolist()):
            places = slice(int(sequences.prompt_lens[row]), int(sequences.lengths[row]) - 1)
            here = slice(offsets[row], offsets[row + 1])
            tokens[here], log_odds[here] = drafted_tokens[index, places], signals[index, places]
        on_share((number + 1) / len(plan))
    temperatures = np.repeat(answers.temperatures.astype(float), np.diff(offsets)).tolist()
    return Drafts(tokens, np.array(stored.scores(sigmoid(log_odds).tolist(), temperatures), dtype=np.float32))


def row_offsets(answers: Answers) -> np.ndarray:
    """[N + 1], where the rows of each sequence begin."""
    counts = np.maximum(np.diff(answers.starts) - answers.prompt_lens - 1, 0)
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def lookup_drafts(answers: Answers, min_len: int, max_len: int) -> Drafts:
    """Prompt lookup behind each token; its scores are those of its length of match on the other half of the prompts."""
    offsets = row_offsets(answers)
    tokens = np.full((offsets[-1], _NUM_LOOKUP_DRAFTS), -1, dtype=np.int32)
    lengths = np.zeros(offsets[-1], dtype=np.int64)
    for row, text in enumerate(_texts(answers)):
        for place in range(offsets[row + 1] - offsets[row]):
            known = text[: answers.prompt_lens[row] + place + 1]
            length, end = longest_suffix_match(known, min_len, max_len)
            if length:
                found = known[end : end + _NUM_LOOKUP_DRAFTS]
                tokens[offsets[row] + place, : len(found)], lengths[offsets[row] + place] = found, length
    accepted = accepted_drafts(answers, tokens)
    half = np.repeat(np.arange(len(offsets) - 1) // len(TEMPERATURES) % 2, np.diff(offsets))
    scores = np.zeros(tokens.shape, dtype=np.float32)
    is_tried = (np.arange(tokens.shape[1]) <= accepted[:, None]) & (tokens >= 0)
    for side in (0, 1):
        for length in range(min_len, max_len + 1):
            others, here = (half != side) & (lengths == length), (half == side) & (lengths == length)
            scores[here] = (accepted[others].sum() + 0.5) / (is_tried[others].sum() + 1.0)
    return Drafts(tokens, scores)


def suffix_steps(answers: Answers, num_drafts: int) -> np.ndarray:
    """[N] steps that the suffix method takes, in the order of the answers, which is that of their prompts' lengths."""
    method = Suffix(Limits(24, 1.0, 0.1), max_num_drafts=num_drafts)
    steps = np.zeros(len(answers.prompt_lens), dtype=np.int64)
    for row, text in enumerate(_texts(answers)):
        num_prompt, length = int(answers.prompt_lens[row]), len(text)
        tenant = f"{answers.temperatures[row]:g}".encode()
        method.open(row, DraftOpen(row, 0, text[: num_prompt + 1].tolist(), num_prompt, SamplingParams(), 0, tenant_cache_key=tenant))
        place = num_prompt
        while place < length - 1:
            [drafts] = method.propose([Ask(row, num_drafts)])
            following = text[place + 1 : place + 1 + len(drafts.token_ids)].tolist()
            accepted = next((i for i, token in enumerate(following) if token != drafts.token_ids[i]), len(following))
            after = min(place + accepted + 1, length - 1)
            method.append(row, text[place + 1 : after + 1].tolist())
            place = after
            steps[row] += 1
        method.close(row)
        while method.catch_up(1 << 20):
            pass
    return steps


def accepted_drafts(answers: Answers, tokens: np.ndarray) -> np.ndarray:
    """[P]: how many drafts of each row are what follows in the answer."""
    offsets, accepted = row_offsets(answers), np.zeros(len(tokens), dtype=np.int64)
    for row, text in enumerate(_texts(answers)):
        here = tokens[offsets[row] : offsets[row + 1]]
        behind = np.concatenate((text[answers.prompt_lens[row] + 1 :], np.full(here.shape[1], -2, dtype=text.dtype)))
        following = np.lib.stride_tricks.sliding_window_view(behind, here.shape[1])[: len(here)]
        accepted[offsets[row] : offsets[row + 1]] = (here == following).cumprod(1).sum(1)
    return accepted


def walk_rows(answers: Answers, accepted: np.ndarray) -> list[np.ndarray]:
    """Of each sequence the rows where its steps begin."""
    offsets = row_offsets(answers)
    walks = []
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        rows, row = [], first
        while row < last:
            rows.append(row)
            row += int(accepted[row]) + 1
        walks.append(np.array(rows, dtype=np.int64))
    return walks


def describe(answers: Answers, drafts: Drafts, lengths: Iterable[int], lookups: Drafts | None = None) -> dict[str, Any]:
    """Tokens a step by temperature, most drafts and category, and how well the scores predict acceptance.

    Args:
        lengths: most drafts.
        lookups: with which the drafts are combined: at each step what more is expected of.
    """
    accepted = accepted_drafts(answers, drafts.tokens)
    scores = drafts.scores
    if lookups is not None:
        is_lookup = _expected(lookups) > _expected(drafts)
        accepted = np.where(is_lookup, accepted_drafts(answers, lookups.tokens), accepted)
    result: dict[str, Any] = {}
    for most in lengths:
        walks = walk_rows(answers, np.minimum(accepted, most))
        result[f"k{most}"] = tokens_per_step(answers, np.array([len(rows) for rows in walks]))
        if lookups is None:
            errors = {}
            for temperature in TEMPERATURES:
                chosen = [rows for rows, at in zip(walks, answers.temperatures, strict=True) if abs(at - temperature) < 1e-6 and len(rows)]
                errors[f"t{temperature:g}"] = _calibration(answers, np.concatenate(chosen), drafts.tokens[:, :most], scores, accepted)
            result[f"k{most}"] = {key: part | errors[key] for key, part in result[f"k{most}"].items()}
    return result


def tokens_per_step(answers: Answers, steps: np.ndarray) -> dict[str, Any]:
    """By temperature: of all, of all without answers that loop, and by category."""
    tokens = np.diff(row_offsets(answers))
    result: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        is_here = np.isclose(answers.temperatures, temperature)

        def ratio(mask: np.ndarray) -> float | None:
            return round(float(tokens[mask].sum() / steps[mask].sum()), 3) if steps[mask].sum() else None

        result[f"t{temperature:g}"] = {
            "all": ratio(is_here),
            "without_loops": ratio(is_here & ~answers.loops),
            "loops": round(float(answers.loops[is_here].mean()), 3),
            "by_category": {name: ratio(is_here & (answers.categories == name)) for name in sorted(set(answers.categories.tolist()))},
        }
    return result


def _calibration(answers: Answers, rows: np.ndarray, tokens: np.ndarray, scores: np.ndarray, accepted: np.ndarray) -> dict[str, Any]:
    """Of the drafts whose outcome is known: those accepted and the first that was not; the end of an answer tells nothing."""
    ends = row_offsets(answers)[1:]
    left = ends[np.searchsorted(ends, rows, side="right")] - rows  # tokens behind each row's
    columns = np.arange(tokens.shape[1])
    is_known = (columns <= accepted[rows, None]) & (columns < left[:, None]) & (tokens[rows] >= 0)
    predicted, outcome = scores[rows, : tokens.shape[1]][is_known], (columns < accepted[rows, None])[is_known]
    error, area = calibration_error(predicted, outcome), area_under_curve(predicted, outcome)
    shares = [round(float((accepted[rows] > column).mean()), 4) for column in columns]
    return {
        "first_drafts_accepted": shares,
        "calibration_error": error and round(error, 4),
        "area_under_curve": area and round(area, 4),
    }


def _expected(drafts: Drafts) -> np.ndarray:
    return np.where(drafts.tokens >= 0, drafts.scores, 0.0).cumprod(1).sum(1)


def _texts(answers: Answers) -> Iterator[np.ndarray]:
    for first, last in zip(answers.starts[:-1].tolist(), answers.starts[1:].tolist(), strict=True):
        yield answers.tokens[first:last]


def describe_lookups(path: Path) -> dict[str, Any]:
    """Lookups alone, over the answers in a file; writes the drafts that combinations need beside it."""
    answers = Answers.load(path)
    result: dict[str, Any] = {}
    for name, (min_len, max_len) in _LOOKUPS.items():
        drafts = lookup_drafts(answers, min_len, max_len)
        result[name] = describe(answers, drafts, (_NUM_LOOKUP_DRAFTS,))
        if name == _IN_COMBINATION:
            save_drafts(path.with_name("drafts-lookup.npz"), drafts)
    result["suffix"] = {"k5": tokens_per_step(answers, suffix_steps(answers, 5)), "k16": tokens_per_step(answers, suffix_steps(answers, 16))}
    return result


def save_drafts(path: Path, drafts: Drafts) -> None:
    """As one compressed file."""
    scratch = path.with_name(f".{path.name}")
    with scratch.open("wb") as file:
        np.savez_compressed(file, tokens=drafts.tokens, scores=drafts.scores.astype(np.float16))
    os.replace(scratch, path)


def load_drafts(path: Path) -> Drafts:
    """What `save_drafts` wrote."""
    with np.load(path) as stored:
        return Drafts(stored["tokens"], stored["scores"].astype(np.float32))


def describe_folder(folder: Path) -> dict[str, Any]:
    """All of a folder with answers.npz and drafts-NAME.npz: lookups, heads, and heads with lookup."""
    answers = Answers.load(folder / "answers.npz")
    result = {"num_answers": len(answers.prompt_lens), "num_tokens": int(row_offsets(answers)[-1]), **describe_lookups(folder / "answers.npz")}
    lookups = load_drafts(folder / "drafts-lookup.npz")
    for path in sorted(folder.glob("drafts-*.npz")):
        name = path.stem.removeprefix("drafts-")
        if name != "lookup":
            result |= describe_head(answers, name, load_drafts(path), lookups)
    return result


def describe_head(answers: Answers, name: str, drafts: Drafts, lookups: Drafts | None) -> dict[str, Any]:
    """A head alone and, if they are given, with lookups."""
    most = drafts.tokens.shape[1]
    result = {name: describe(answers, drafts, sorted({min(3, most), min(5, most), most}))}
    return result | ({f"{name}+lookup": describe(answers, drafts, (most,), lookups)} if lookups is not None else {})


def main() -> None:
    """Counts again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="answers.npz and drafts-*.npz")
    folder = parser.parse_args().folder
    (folder / "heads.json").write_text(json.dumps(describe_folder(folder), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
