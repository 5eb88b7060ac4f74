"""Step 1: what load this is. Bound by latency or by throughput, how repetitive, how much of the stack it uses."""

import math
from dataclasses import dataclass

from specwire.advise.lookup import Repetition

LOW_SHARE, HIGH_SHARE = 0.25, 1.5
"""Of the requests a second that plain decoding can serve: rates to measure at where none are given."""


@dataclass(frozen=True, slots=True)
class PlainRun:
    """A closed loop of plain decoding.

    Args:
        concurrency: requests at once.
        requests_per_s, tokens_per_s: that were served.
        tpot_ms: median time of a token after the first one; e2el_s: median time of a request.
    """

    concurrency: int
    requests_per_s: float
    tokens_per_s: float
    tpot_ms: float
    e2el_s: float


@dataclass(frozen=True, slots=True)
class Rate:
    """One of the two loads.

    Args:
        name: low or high.
        requests_per_s: that arrive.
        utilisation: by what plain decoding can serve; above 1 requests queue up.
        num_running: sequences at once, by Little's law and no more than run at once.
        growth: share by which twice as many at once make a token's time longer, near so many.
    """

    name: str
    requests_per_s: float
    utilisation: float
    num_running: int
    growth: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, and what plain decoding makes of it.

    Args:
        prompt_tokens, output_tokens: means.
        alone, some, full: plain decoding of one request at a time, of a few, and of as many as run at once.
        bound_share: largest growth of a rate that is bound by latency.
    """

    num_prompts: int
    prompt_tokens: float
    output_tokens: float
    repetition: Repetition
    alone: PlainRun
    some: PlainRun
    full: PlainRun
    low: Rate
    high: Rate
    bound_share: float

    def bound(self, rate: Rate) -> str:
        """latency: a step has room for more tokens. throughput: drafts take the place of other requests' tokens."""
        return "latency" if rate.growth <= self.bound_share else "throughput"

    def sentences(self) -> list[str]:
        """It in words."""
        repetition = self.repetition
        words = [
            f"{self.num_prompts} prompts of {self.prompt_tokens:.0f} tokens, answers of {self.output_tokens:.0f} tokens (means)",
            f"{repetition.share:.0%} of the answers' tokens stood before behind the same three tokens ({repetition.in_prompt:.0%} in the prompt, "
            f"{repetition.in_answer:.0%} earlier in the answer), and {repetition.elsewhere:.0%} more in another answer",
            f"plain decoding gives {self.full.tokens_per_s:.1f} tokens/s ({self.full.requests_per_s:.2f} requests/s) with {self.full.concurrency} at "
            f"once, a token every {self.full.tpot_ms:.1f} ms, and every {self.alone.tpot_ms:.1f} ms for one request alone",
        ]
        for rate in (self.low, self.high):
            room = "its steps have room for drafts" if self.bound(rate) == "latency" else "drafts take the place of other requests' tokens"
            words.append(
                f"at the {rate.name} rate, {rate.requests_per_s:.2f} requests/s, {rate.utilisation:.0%} of that is asked for, and about "
                f"{rate.num_running} run at once; twice as many would make each token {rate.growth:.0%} slower: bound by {self.bound(rate)}, {room}"
            )
        return words


def growth(number: int, alone: PlainRun, some: PlainRun, full: PlainRun) -> float:
    """Share by which each doubling made a token's time longer, between the two runs that `number` requests at once are between."""
    less, more = (alone, some) if number <= some.concurrency and some.concurrency > alone.concurrency else (some, full)
    if more.concurrency <= less.concurrency:
        return 0.0
    doublings = math.log2(more.concurrency / less.concurrency)
    return max(0.0, float((more.tpot_ms / less.tpot_ms) ** (1 / doublings)) - 1)


def num_running(requests_per_s: float, alone: PlainRun, full: PlainRun) -> int:
    """Sequences at once at a rate, by Little's law; a request takes the longer the more there are, in proportion between the two runs."""
    number = requests_per_s * alone.e2el_s
    for _ in range(50):
        share = min(1.0, max(0.0, (number - alone.concurrency) / max(1, full.concurrency - alone.concurrency)))
        number = min(float(full.concurrency), requests_per_s * (alone.e2el_s + share * max(0.0, full.e2el_s - alone.e2el_s)))
    return max(1, round(number))
