"""The target's own answers to benchmark prompts, at several temperatures, with the noise of served requests."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specwire.bench.workload import PromptLine, read_prompt_file
from specwire.tokenizer import Tokenizer
from specwire.train.data import Job, Sequences, encode_prompt
from specwire.train.generate import generate
from specwire.train.loops import length_without_loop
from specwire.train.noise import Noise
from specwire.train.target import Target

TEMPERATURES = (0.0, 0.7, 1.0)
MAX_NEW = 256
_ROOM = 32
_ROWS, _CPU_ROWS = 768, 24
"""At once."""
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class Answers:
    """N prompts with their answers, end to end; see `specwire.train.data.Sequences`."""

    tokens: np.ndarray  # [T] int32
    starts: np.ndarray  # [N + 1] int64
    prompt_lens: np.ndarray  # [N] int64
    temperatures: np.ndarray  # [N] float32
    keys: np.ndarray  # [N] int64
    categories: np.ndarray  # [N] text
    loops: np.ndarray  # [N] bool, the answer ends in a loop

    @property
    def sequences(self) -> Sequences:
        """As the evaluation reads them."""
        count = len(self.prompt_lens)
        return Sequences(self.tokens, self.starts, self.prompt_lens, self.temperatures == 0, np.ones(count, dtype=bool), int(self.loops.sum()))

    def noise(self, rows: np.ndarray, device: torch.device) -> Noise:
        """Of these sequences."""
        return Noise(torch.from_numpy(self.temperatures[rows]).to(device), torch.from_numpy(self.keys[rows]).to(device))

    def save(self, path: Path) -> None:
        """As one compressed file."""
        scratch = path.with_name(f".{path.name}")
        with scratch.open("wb") as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in self.__slots__})
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: Path) -> "Answers":
        with np.load(path) as stored:
            return cls(**{name: stored[name] for name in cls.__slots__})


def make_answers(
    target: Target, tokenizer: Tokenizer, prompts: Path, on_share: Callable[[float], None], *, max_new: int, num_prompts: int, max_prompt: int = 0
) -> Answers:
    """Generates one answer to each prompt that fits and each temperature.

    Args:
        on_share: called with the share that is done; it may raise to stop.
        num_prompts: the first so many of a fixed random order; 0 = all.
        max_prompt: most tokens of a prompt; 0 = as many as fit.
    """
    longest = min(target.config.max_position_embeddings - max_new - _ROOM, max_prompt or sys.maxsize)
    lines = [(line, encode_prompt(tokenizer, line.text)) for line in read_prompt_file(prompts)]
    fitting = [(line, tokens) for line, tokens in lines if len(tokens) <= longest]
    chosen = [fitting[index] for index in np.random.default_rng(0).permutation(len(fitting))[: num_prompts or len(fitting)]]
    chosen.sort(key=lambda item: len(item[1]))  # batches of about equal lengths
    asked = [(line, Job(tokens, temperature, is_held_out=True)) for line, tokens in chosen for temperature in TEMPERATURES]
    jobs = [job for _, job in asked]
    temperatures, keys = np.array([job.temperature for job in jobs], dtype=np.float32), np.arange(len(jobs), dtype=np.int64) * 7919 + 1
    noise = Noise(torch.from_numpy(temperatures).to(target.device), torch.from_numpy(keys).to(target.device))
    answers = generate(target, jobs, max_new, 0, on_share, min(_ROWS if target.device.type == "cuda" else _CPU_ROWS, len(jobs)), noise)
    parts = [np.concatenate((np.array(job.prompt), answer)).astype(np.int32) for job, answer in zip(jobs, answers, strict=True)]
    return Answers(
        tokens=np.concatenate(parts),
        starts=np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64),
        prompt_lens=np.array([len(job.prompt) for job in jobs], dtype=np.int64),
        temperatures=temperatures,
        keys=keys,
        categories=np.array([category(line) for line, _ in asked]),
        loops=np.array([length_without_loop(answer) < len(answer) for answer in answers]),
    )


def category(line: PromptLine) -> str:
    """As the tables have it: MT-bench's eight are one."""
    is_mt_bench = line.category in _MT_BENCH or (line.category == "coding" and line.name.startswith("specbench/"))
    return "mt_bench" if is_mt_bench else line.category
