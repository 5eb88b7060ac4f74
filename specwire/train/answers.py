"""Answers on disk: a folder of parts, so that an interrupted run goes on and several heads share them."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specwire.errors import FailedPreconditionError
from specwire.train.data import DataConfig, Job, jobs_hash
from specwire.train.deadline import Deadline
from specwire.train.generate import generate
from specwire.train.target import Target

_ABOUT = "answers.json"


def load_or_generate(
    folder: Path, target: Target, jobs: Sequence[Job], config: DataConfig, deadline: Deadline, on_answers: Callable[[float, float], None]
) -> list[np.ndarray]:
    """The answer to each job; what the folder has is taken from it, the rest generated and saved.

    Args:
        on_answers: called with (answers done, answers in all).

    Raises:
        FailedPreconditionError: the folder has answers of another model, or to other prompts.
        TimeUp: the deadline came first; all parts that are complete are saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_about(
        folder / _ABOUT,
        {"weights_hash": target.weights_hash, "jobs": jobs_hash(jobs), **config.to_dict()},
        "answers",
        "name another folder for them (--answers), or delete this one",
    )
    answers: list[np.ndarray] = []
    for number, first in enumerate(range(0, len(jobs), config.rows_per_part)):
        part = jobs[first : first + config.rows_per_part]
        path = folder / f"part-{number:05d}.npz"
        if not path.is_file():

            def on_token(share: float, num_done: int = len(answers), size: int = len(part)) -> None:
                deadline.check()
                on_answers(num_done + share * size, len(jobs))

            _save(path, generate(target, part, config.max_answer_tokens, config.seed * 100_003 + number, on_token))
        answers += _load(path)
        on_answers(len(answers), len(jobs))
    return answers


def check_about(path: Path, content: dict[str, Any], what: str, remedy: str) -> None:
    """Writes what a folder is of, or compares it with what it was written for.

    Raises:
        FailedPreconditionError: they differ; it names in what.
    """
    if not path.is_file():
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    different = [f"{key} ({known.get(key)!r}, now {value!r})" for key, value in content.items() if known.get(key) != value]
    if different:
        raise FailedPreconditionError(f"{path.parent} holds {what} of another run, which differs in {', '.join(different)}; {remedy}")


def _save(path: Path, answers: Sequence[np.ndarray]) -> None:
    scratch = path.with_name(f".{path.name}")
    with scratch.open("wb") as file:
        np.savez(file, tokens=np.concatenate(answers).astype(np.int32), lengths=np.array([len(answer) for answer in answers]))
    os.replace(scratch, path)


def _load(path: Path) -> list[np.ndarray]:
    with np.load(path) as stored:
        return np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
