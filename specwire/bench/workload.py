"""What is asked: prompts from a file or made-up token ids of given lengths."""

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specwire.errors import InvalidArgumentError

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

_STREAM = 2  # see arrivals.py
DISTRIBUTIONS = ("fixed", "uniform", "lognormal")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload.

    Attributes:
        name: of the prompt in its file, or its number.
        category: of the prompt in its file, or empty.
        weight: how much it counts in weighted results.
        token_ids: empty where it is sent as text.
        max_tokens: most tokens of its answer.
        text: for a server that encodes it; is_chat: as a question, in the model's chat template.
    """

    name: str
    token_ids: list[int]
    max_tokens: int
    category: str = ""
    weight: float = 1.0
    text: str = ""
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompt file."""

    name: str
    text: str
    category: str
    weight: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long made-up prompts and answers are.

    Args:
        input_len, output_len: mean tokens of a prompt (without its prefix) and of an answer.
        distribution: fixed; uniform over mean x (1 - spread) to mean x (1 + spread); or lognormal with that mean and sigma = spread.
        prefix_len: tokens that all prompts begin with, on top of input_len.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    input_len: int
    output_len: int
    distribution: str = "fixed"
    spread: float = 0.5
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for flag, value, low in (("--input-len", self.input_len, 1), ("--output-len", self.output_len, 1), ("--prefix-len", self.prefix_len, 0)):
            if value < low:
                raise InvalidArgumentError(f"{flag} is {value}, but must be at least {low}")
        if self.distribution not in DISTRIBUTIONS:
            raise InvalidArgumentError(f"--length-distribution is {self.distribution!r}, but must be one of {', '.join(DISTRIBUTIONS)}")
        limit = 1.0 if self.distribution == "uniform" else 4.0
        if not 0 <= self.spread <= limit:
            raise InvalidArgumentError(f"--length-spread is {self.spread}, but must be from 0 to {limit:g} for {self.distribution} lengths")

    def draw(self, mean: int, count: int, rng: np.random.Generator) -> list[int]:
        """`count` lengths, each at least 1."""
        if self.distribution == "fixed":
            return [mean] * count
        if self.distribution == "uniform":
            low, high = math.ceil(mean * (1 - self.spread)), math.floor(mean * (1 + self.spread))
            values = rng.integers(low, high + 1, size=count)
        else:
            # The mean of a lognormal distribution is exp(mu + sigma^2 / 2).
            values = np.rint(rng.lognormal(math.log(mean) - self.spread**2 / 2, self.spread, size=count)).astype(np.int64)
        return [int(value) for value in np.maximum(values, 1)]


def synthetic_prompts(count: int, lengths: Lengths, allowed_ids: Sequence[int], seed: int) -> list[Prompt]:
    """Prompts of uniformly drawn token ids; the first ones are the same whatever `count` is.

    Args:
        allowed_ids: what is drawn from.
    """
    rng = np.random.default_rng([seed, _STREAM])
    ids = np.asarray(allowed_ids, dtype=np.int64)
    prefix = rng.choice(ids, size=lengths.prefix_len).tolist()
    prompts = []
    for index in range(count):
        [num_input] = lengths.draw(lengths.input_len, 1, rng)
        [num_output] = lengths.draw(lengths.output_len, 1, rng)
        prompts.append(Prompt(str(index), [*prefix, *rng.choice(ids, size=num_input).tolist()], num_output))
    return prompts


def file_prompts(lines: Sequence[PromptLine], tokenizer: "Tokenizer", max_tokens: int, *, as_chat: bool) -> list[Prompt]:
    """The lines as token ids, in the model's chat template if `as_chat`."""
    return [
        Prompt(
            line.name,
            tokenizer.encode_chat([{"role": "user", "content": line.text}]) if as_chat else tokenizer.encode(line.text),
            max_tokens,
            line.category,
            line.weight,
        )
        for line in lines
    ]


def text_prompts(lines: Sequence[PromptLine], max_tokens: int, *, as_chat: bool) -> list[Prompt]:
    """The lines as they are, for a server that encodes them."""
    return [Prompt(line.name, [], max_tokens, line.category, line.weight, line.text, as_chat) for line in lines]


def repeat(prompts: Sequence[Prompt], count: int, first: int = 0) -> list[Prompt]:
    """`count` of them in order from number `first` on, and again from the start where there are too few."""
    return [prompts[(first + index) % len(prompts)] for index in range(count)]


def read_prompt_file(path: Path) -> list[PromptLine]:
    """Reads a JSONL file (also gzipped): `prompt`, or `turns` of which the first counts; optionally `id`, `category` and `weight`.

    Raises:
        InvalidArgumentError: the file can't be read or has no prompts, or a line is wrong; it names the line.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = content.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the prompt file {path} can't be read: {error}") from error
    lines = [_prompt_line(f"line {number} of {path}", number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InvalidArgumentError(f"the prompt file {path} is empty; write one JSON object with `prompt` or `turns` a line")
    return lines


def _prompt_line(place: str, number: int, line: str) -> PromptLine:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{place} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{place} is a {type(value).__name__}, but must be an object with `prompt` or `turns`")
    weight = value.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise InvalidArgumentError(f"{place} has the weight {weight!r}, but it must be a positive number")
    return PromptLine(str(value.get("id", number)), _prompt_text(place, value), str(value.get("category", "")), float(weight))


def _prompt_text(place: str, value: dict[str, Any]) -> str:
    turns = value.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(f"{place} has no text; give `prompt` as a string, or `turns` as a list of strings")
    return text
