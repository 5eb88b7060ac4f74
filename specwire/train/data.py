"""The training text: prompts of a file, divided into jobs, and the target's answers to them as flat arrays."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specwire.bench.workload import read_prompt_file
from specwire.errors import InvalidArgumentError
from specwire.tokenizer import Tokenizer
from specwire.train.loops import length_without_loop

_ROOM = 32
"""Positions behind a sequence that drafts of its last tokens may need."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which prompts are answered, and how. Lengths in tokens.

    Args:
        num_prompts: that are drawn from the file; 0 = all that fit.
        num_held_out: prompts of these that are never trained on, at most a tenth of them.
        max_prompt_tokens: longer prompts are left out.
        max_answer_tokens: answers end there.
        answers_per_prompt: greedy ones of one prompt are equal, so more than 2 make sense only with a small greedy_share.
        greedy_share: share of answers that always take the most likely token.
        temperature: of the others.
        rows_per_part: answers that are saved together; an interrupted run loses at most a part.
        seed: of everything that is drawn.
    """

    num_prompts: int = 0
    num_held_out: int = 512
    max_prompt_tokens: int = 320
    max_answer_tokens: int = 256
    answers_per_prompt: int = 1
    greedy_share: float = 0.5
    temperature: float = 0.7
    rows_per_part: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_answer_tokens", "answers_per_prompt", "rows_per_part"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"data: {name} is {getattr(self, name)}, but must be at least 1")
        if self.num_prompts < 0 or self.num_held_out < 1:
            raise InvalidArgumentError(f"data: num_prompts is {self.num_prompts} and num_held_out {self.num_held_out}; use at least 0 and 1")
        if not 0 <= self.greedy_share <= 1 or not 0 < self.temperature <= 2:
            raise InvalidArgumentError(
                f"data: greedy_share is {self.greedy_share} and temperature {self.temperature}; use 0 to 1, and more than 0 to 2"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to generate."""

    prompt: list[int]
    temperature: float  # 0 = greedy
    is_held_out: bool


def make_jobs(path: Path, tokenizer: Tokenizer, config: DataConfig, max_model_len: int) -> list[Job]:
    """All answers to generate, by length of the prompt.

    Raises:
        InvalidArgumentError: the file can't be read, or too few of its prompts fit.
    """
    longest = min(config.max_prompt_tokens, max_model_len - config.max_answer_tokens - _ROOM)
    prompts = []
    for line in read_prompt_file(path):
        tokens = encode_prompt(tokenizer, line.text)
        if 1 <= len(tokens) <= longest:
            prompts.append(tokens)
    order = np.random.default_rng([config.seed, 1]).permutation(len(prompts))
    chosen = [prompts[index] for index in order[: config.num_prompts or len(prompts)]]
    num_held_out = min(config.num_held_out, len(chosen) // 10)
    if num_held_out < 1:
        raise InvalidArgumentError(
            f"{len(chosen)} prompts of {path} have at most {longest} tokens, and training needs 10: allow longer ones (max_prompt_tokens), "
            f"shorter answers (max_answer_tokens), or give a larger file"
        )
    jobs = []
    for index, prompt in enumerate(chosen):
        for number in range(index * config.answers_per_prompt, (index + 1) * config.answers_per_prompt):
            is_greedy = int((number + 1) * config.greedy_share) > int(number * config.greedy_share)
            jobs.append(Job(prompt, 0.0 if is_greedy else config.temperature, index < num_held_out))
    return sorted(jobs, key=lambda job: len(job.prompt))


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """In the chat template, where there is one."""
    is_chat = tokenizer.to_spec().chat_template is not None
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if is_chat else tokenizer.encode(text)


def jobs_hash(jobs: Sequence[Job]) -> str:
    """Hex digest of everything in the jobs."""
    digest = hashlib.sha256()
    for job in jobs:
        digest.update(np.array([len(job.prompt), *job.prompt], dtype=np.int64).tobytes())
        digest.update(f"{job.temperature} {job.is_held_out}".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Sequences:
    """N prompts with their answers, end to end. An answer ends with the EOS token where it has one, and without its loop."""

    tokens: np.ndarray  # [T] int32
    starts: np.ndarray  # [N + 1] int64, first token of each
    prompt_lens: np.ndarray  # [N] int64
    is_greedy: np.ndarray  # [N] bool
    is_held_out: np.ndarray  # [N] bool
    num_loops: int  # answers whose loop was cut

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64, tokens of each."""
        return np.diff(self.starts)

    @property
    def num_answer_tokens(self) -> int:
        """Of all sequences."""
        return int((self.lengths - self.prompt_lens).sum())


def join_answers(jobs: Sequence[Job], answers: Sequence[np.ndarray]) -> Sequences:
    """Puts jobs and their answers together; answers of fewer than two tokens teach nothing and are left out."""
    parts: list[np.ndarray] = []
    prompt_lens, is_greedy, is_held_out = [], [], []
    num_loops = 0
    for job, answer in zip(jobs, answers, strict=True):
        length = length_without_loop(answer)
        num_loops += length < len(answer)
        if length < 2:
            continue
        parts.append(np.concatenate((np.array(job.prompt, dtype=np.int32), answer[:length].astype(np.int32))))
        prompt_lens.append(len(job.prompt))
        is_greedy.append(job.temperature == 0)
        is_held_out.append(job.is_held_out)
    if not all(any(held_out == wanted for held_out in is_held_out) for wanted in (True, False)):
        raise InvalidArgumentError(f"{len(parts)} of {len(jobs)} answers have two tokens or more, too few to train and evaluate; use more prompts")
    return Sequences(
        tokens=np.concatenate(parts),
        starts=np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64),
        prompt_lens=np.array(prompt_lens, dtype=np.int64),
        is_greedy=np.array(is_greedy),
        is_held_out=np.array(is_held_out),
        num_loops=num_loops,
    )
