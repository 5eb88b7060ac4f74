"""What `specwire advise` was asked for."""

import math
from dataclasses import dataclass
from pathlib import Path

from specwire.bench.accept import AcceptOptions
from specwire.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class AdviseOptions:
    """All options.

    Args:
        accept: which prompts, how they are asked, and by how many at once while acceptance is measured.
        concurrencies: requests at once while steps are measured; empty = 1, 4, 16, ... as far as they run at once.
        step_len: tokens of each answer of those.
        repeats: how often each of them is measured.
        min_gain: share of throughput that is not worth drafting, nor a range of batch sizes of its own.
        output: folder for what is written.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    accept: AcceptOptions
    output: Path
    concurrencies: tuple[int, ...] = ()
    step_len: int = 64
    repeats: int = 3
    min_gain: float = 0.02

    def __post_init__(self) -> None:
        for concurrency in self.concurrencies:
            if concurrency < 1:
                raise InvalidArgumentError(f"--concurrency has {concurrency}, but each number must be at least 1")
        if self.step_len < 8:
            raise InvalidArgumentError(f"--step-len is {self.step_len}, but must be at least 8: fewer steps say too little")
        if self.repeats < 1:
            raise InvalidArgumentError(f"--repeats is {self.repeats}, but must be at least 1")
        if not 0 <= self.min_gain < math.inf:
            raise InvalidArgumentError(f"--min-gain is {self.min_gain}, but must be a share from 0 on, such as 0.02")


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """From `1,4,16`, rising and each once. Raises InvalidArgumentError."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise InvalidArgumentError(f"--concurrency is {text!r}, but must be whole numbers with commas between them, such as 1,4,16") from None
