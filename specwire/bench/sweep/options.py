"""What `specwire sweep` was asked for."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from specwire.bench.serve_options import ServeOptions
from specwire.errors import InvalidArgumentError

POLICIES = ("none", "fixed", "dynamic", "adaptive")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """All options.

    Args:
        load: what is asked in every cell; num_prompts, max_concurrency and num_warmups are the cell's own.
        concurrencies: requests at once.
        policies: ways to choose K, of POLICIES; empty = all that the stack can have.
        fixed: K of the fixed ones; empty = as configured.
        prompts_per_user: requests of a cell are this many times its concurrency.
        repeats: how often everything is measured.
        output: folder for sweep.json and sweep.png.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    load: ServeOptions
    output: Path
    concurrencies: tuple[int, ...] = (1, 4, 16)
    policies: tuple[str, ...] = ()
    fixed: tuple[int, ...] = ()
    prompts_per_user: int = 4
    repeats: int = 1

    def __post_init__(self) -> None:
        for flag, values in (("--concurrency", self.concurrencies), ("--fixed", self.fixed)):
            for value in values:
                if value < 1:
                    raise InvalidArgumentError(f"{flag} has {value}, but each number must be at least 1")
        if not self.concurrencies:
            raise InvalidArgumentError("--concurrency is empty; give numbers with commas between them, such as 1,4,16")
        for policy in self.policies:
            if policy not in POLICIES:
                raise InvalidArgumentError(f"--policies has {policy!r}, but each must be one of {', '.join(POLICIES)}")
        for flag, value in (("--prompts-per-user", self.prompts_per_user), ("--repeats", self.repeats)):
            if value < 1:
                raise InvalidArgumentError(f"{flag} is {value}, but must be at least 1")

    def wants(self, policy: str) -> bool:
        return not self.policies or policy in self.policies

    def cell(self, concurrency: int) -> ServeOptions:
        """The load of one cell: a closed loop, after as many requests to warm up as there are at once."""
        return dataclasses.replace(
            self.load,
            num_prompts=self.prompts_per_user * concurrency,
            max_concurrency=concurrency,
            num_warmups=concurrency,
            save_detailed=True,
        )


def parse_numbers(flag: str, text: str) -> tuple[int, ...]:
    """From `1,4,16`, rising and each once. Raises InvalidArgumentError."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise InvalidArgumentError(f"{flag} is {text!r}, but must be whole numbers with commas between them, such as 1,4,16") from None
