"""What `specwire bench serve` was asked for."""

import math
from dataclasses import dataclass
from pathlib import Path

from specwire.bench.arrivals import arrival_times
from specwire.bench.statistics import DEFAULT_PERCENTILES, Objective
from specwire.bench.workload import Lengths
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams

_LENGTHS = Lengths(128, 128)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options.

    Args:
        address: of a coordinator, or the URL of a server; what calls it is made by the caller.
        prompts: a prompt file; None = made-up prompts of these lengths.
        num_prompts: requests that are measured; None = the file's prompts, or 100.
        request_rate: requests a second; infinite = all at once, or as max_concurrency allows.
        num_warmups: requests sent before, which count nowhere.
        seed: of arrivals, made-up prompts and sampling.
        params: sampling parameters of all requests.
        vocab_size: of made-up prompts where no tokenizer is served; 0 = the served one's.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    address: str
    prompts: Path | None = None
    chat: bool = False
    lengths: Lengths = _LENGTHS
    num_prompts: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    params: SamplingParams = SamplingParams()
    vocab_size: int = 0
    timeout_s: float | None = None
    max_retries: int = 0
    ready_timeout_s: float = 10.0
    percentiles: tuple[float, ...] = DEFAULT_PERCENTILES
    objective: Objective | None = None
    output: Path | None = None
    save_detailed: bool = False
    allow_errors: bool = False

    def __post_init__(self) -> None:
        arrival_times(0, self.request_rate, self.burstiness, self.seed)
        for flag, value, low in (
            ("--num-prompts", self.num_prompts, 1), ("--max-concurrency", self.max_concurrency, 1), ("--warmup", self.num_warmups, 0),
            ("--seed", self.seed, 0), ("--retries", self.max_retries, 0), ("--vocab-size", self.vocab_size, 0),
        ):  # fmt: skip
            if value is not None and value < low:
                raise InvalidArgumentError(f"{flag} is {value}, but must be at least {low}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidArgumentError(f"--timeout is {self.timeout_s}, but must be a positive number of seconds; leave it out to wait without limit")
        if self.chat and self.prompts is None:
            raise InvalidArgumentError("--chat needs texts; give a file with --prompts")


def plan_arrivals(options: ServeOptions, num_prompts: int) -> list[float] | None:
    """When requests are due; None for a closed loop, which a limit of concurrent requests without a rate makes."""
    if math.isinf(options.request_rate) and options.max_concurrency is not None:
        return None
    return arrival_times(num_prompts, options.request_rate, options.burstiness, options.seed)
