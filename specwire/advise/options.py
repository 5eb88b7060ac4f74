"""What `specwire advise` was asked for."""

import math
from dataclasses import dataclass
from pathlib import Path

from specwire.bench.accept import AcceptOptions
from specwire.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What decides.

    Args:
        min_gain: share of throughput that is not worth drafting, nor a range of batch sizes of its own.
        min_acceptance_length: mean tokens of a verification with drafts, below which nothing more is measured; keep_going: it is nevertheless.
        min_tpot_gain: share of a token's time that speculation must save to be switched on without more ado.
        max_loss: share of throughput, or of a token's time, up to which one counts as not worse.
        bound_share: largest share by which twice the tokens make a step longer where the load is bound by latency; beyond, throughput bounds it.
        canary_percent: of the requests, at first.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    min_gain: float = 0.02
    min_acceptance_length: float = 1.5
    keep_going: bool = False
    min_tpot_gain: float = 0.3
    max_loss: float = 0.02
    bound_share: float = 0.5
    canary_percent: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < math.inf:
            raise InvalidArgumentError(f"--min-gain is {self.min_gain}, but must be a share from 0 on, such as 0.02")
        if not 1 <= self.min_acceptance_length < math.inf:
            raise InvalidArgumentError(
                f"--min-acceptance-length is {self.min_acceptance_length}, but must be at least 1: each verification gives a token"
            )
        shares = (("--min-tpot-gain", self.min_tpot_gain), ("--max-loss", self.max_loss), ("--bound-share", self.bound_share))
        for flag, value in shares:
            if not 0 <= value < 1:
                raise InvalidArgumentError(f"{flag} is {value}, but must be a share from 0 to below 1, such as 0.3")
        if not 0 < self.canary_percent <= 100:
            raise InvalidArgumentError(f"--canary-percent is {self.canary_percent}, but must be above 0 and at most 100")


@dataclass(frozen=True, slots=True)
class AdviseOptions:
    """All options.

    Args:
        accept: which prompts, how they are asked, and by how many at once while acceptance is measured.
        concurrencies: requests at once while steps are measured, the largest also under full load; empty = 1, 4, 16, ... as far as they run at once.
        step_len: tokens of each answer of those.
        repeats: how often each of them is measured, and each rate.
        low_rate, high_rate: requests a second; None = shares of what plain decoding can serve, see `specwire.advise.workload`.
        online_s: seconds of requests at each rate.
        output: folder for what is written.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    accept: AcceptOptions
    output: Path
    concurrencies: tuple[int, ...] = ()
    step_len: int = 64
    repeats: int = 3
    low_rate: float | None = None
    high_rate: float | None = None
    online_s: float = 20.0
    thresholds: Thresholds = Thresholds()

    def __post_init__(self) -> None:
        for concurrency in self.concurrencies:
            if concurrency < 1:
                raise InvalidArgumentError(f"--concurrency has {concurrency}, but each number must be at least 1")
        if self.step_len < 8:
            raise InvalidArgumentError(f"--step-len is {self.step_len}, but must be at least 8: fewer steps say too little")
        if self.repeats < 1:
            raise InvalidArgumentError(f"--repeats is {self.repeats}, but must be at least 1")
        for flag, value in (("--low-rate", self.low_rate), ("--high-rate", self.high_rate), ("--online-seconds", self.online_s)):
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgumentError(f"{flag} is {value}, but must be above 0")
        if self.low_rate is not None and self.high_rate is not None and self.low_rate >= self.high_rate:
            raise InvalidArgumentError(f"--low-rate is {self.low_rate}, but must be below --high-rate {self.high_rate}")


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """From `1,4,16`, rising and each once. Raises InvalidArgumentError."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise InvalidArgumentError(f"--concurrency is {text!r}, but must be whole numbers with commas between them, such as 1,4,16") from None
