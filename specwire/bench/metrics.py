"""What a run's records say together. Names and definitions are those of `vllm bench serve`, so that figures can be laid side by side; what
it does not have has names of its own.

Only requests that succeeded count in latencies and throughput.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specwire.bench.record import INTERRUPTED, RequestRecord
from specwire.bench.runner import LoadRun
from specwire.bench.statistics import Distribution, Objective
from specwire.messages import SpecStats


@dataclass(frozen=True, slots=True)
class ServeMetrics:
    """Figures of a run.

    Attributes:
        duration_s: from the start of the run to the end of the last request.
        request_goodput: requests a second that meet the objective; None without one.
        max_output_tokens_per_s: most tokens that came within one second of the run (the seconds count from its start).
        max_concurrent_requests: most requests that were sent and had not ended.
        ttft_ms, tpot_ms, e2el_ms: by request; TPOT without answers of one token.
        itl_ms: by chunk: what comes together counts once, as a client of any engine measures it; under speculation about the time of a step.
        token_itl_ms: by token: a chunk's gap divided among its tokens.
        wait_ms: how long the load generator itself held requests back; part of the others in an open loop, not in a closed one.
        errors: failed requests by kind.
        num_interrupted: requests that the end of the run cut off; neither completed nor failed.
        speculation: of the requests that report it, added up.
    """

    duration_s: float
    num_completed: int
    num_failed: int
    num_interrupted: int
    num_retries: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    max_output_tokens_per_s: int
    max_concurrent_requests: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    token_itl_ms: Distribution | None
    e2el_ms: Distribution | None
    wait_ms: Distribution | None
    errors: dict[str, int]
    speculation: SpecStats

    @property
    def latencies(self) -> dict[str, Distribution | None]:
        """By the name that they have in the report."""
        return {
            "ttft": self.ttft_ms,
            "tpot": self.tpot_ms,
            "itl": self.itl_ms,
            "token_itl": self.token_itl_ms,
            "e2el": self.e2el_ms,
            "wait": self.wait_ms,
        }


def measure(run: LoadRun, percentiles: Sequence[float], objective: Objective | None = None) -> ServeMetrics:
    """The figures of a run."""
    records = run.records
    done = [record for record in records if record.is_ok]
    errors = Counter(record.error for record in records if not record.is_ok and record.error != INTERRUPTED)
    duration_s = run.end_s - run.start_s
    num_input = sum(record.num_prompt_tokens for record in done)
    num_output = sum(record.num_output_tokens for record in done)
    num_good = sum(objective.is_met(record) for record in done) if objective else 0

    def distribution(values_s: Sequence[float]) -> Distribution | None:
        return Distribution.of([1000 * value for value in values_s], percentiles)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return ServeMetrics(
        duration_s=duration_s,
        num_completed=len(done),
        num_failed=sum(errors.values()),
        num_interrupted=len(records) - len(done) - sum(errors.values()),
        num_retries=sum(record.num_retries for record in records),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        total_cached_tokens=sum(record.usage.num_cached_tokens for record in done if record.usage),
        request_throughput=rate(len(done)),
        output_throughput=rate(num_output),
        total_token_throughput=rate(num_input + num_output),
        request_goodput=rate(num_good) if objective else None,
        max_output_tokens_per_s=_most_tokens_in_a_second(done, run.start_s),
        max_concurrent_requests=_most_at_once(records),
        ttft_ms=distribution([record.ttft_s for record in done]),
        tpot_ms=distribution([tpot_s for record in done if (tpot_s := record.tpot_s) is not None]),
        itl_ms=distribution([gap for record in done for gap in record.chunk_gaps_s]),
        token_itl_ms=distribution([gap for record in done for gap in record.token_gaps_s]),
        e2el_ms=distribution([record.e2el_s for record in done]),
        wait_ms=distribution([record.wait_s for record in done]),
        errors=dict(errors.most_common()),
        speculation=add_stats([record.spec for record in records if record.spec is not None]),
    )


def add_stats(stats: Sequence[SpecStats]) -> SpecStats:
    """Their sum."""
    num_positions = max((len(entry.accepted_per_position) for entry in stats), default=0)
    padded = [entry.accepted_per_position + (0,) * (num_positions - len(entry.accepted_per_position)) for entry in stats]
    return SpecStats(
        num_drafts=sum(entry.num_drafts for entry in stats),
        num_draft_tokens=sum(entry.num_draft_tokens for entry in stats),
        num_accepted_tokens=sum(entry.num_accepted_tokens for entry in stats),
        accepted_per_position=tuple(map(sum, zip(*padded, strict=True))),
        num_steps=sum(entry.num_steps for entry in stats),
        num_preemptions=sum(entry.num_preemptions for entry in stats),
        synthetic=any(entry.synthetic for entry in stats),
    )


def to_figures(metrics: ServeMetrics) -> dict[str, Any]:
    """For JSON, under the names of `vllm bench serve` where it has them."""
    speculation = metrics.speculation
    figures: dict[str, Any] = {
        "duration": metrics.duration_s,
        "completed": metrics.num_completed,
        "failed": metrics.num_failed,
        "interrupted": metrics.num_interrupted,
        "retries": metrics.num_retries,
        "errors_by_kind": metrics.errors,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "total_cached_tokens": metrics.total_cached_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
        "rtfx": 0.0,  # of audio, which there is none of
    }
    for name, distribution in metrics.latencies.items():
        if distribution is not None:
            figures |= {f"mean_{name}_ms": distribution.mean, f"median_{name}_ms": distribution.median, f"std_{name}_ms": distribution.std}
            figures |= {f"p{percentile:g}_{name}_ms": value for percentile, value in distribution.percentiles}
            figures |= {f"max_{name}_ms": distribution.max, f"num_{name}": distribution.count}
    return figures | {
        "spec_decode_acceptance_rate": 100 * acceptance_rate(speculation),
        "spec_decode_acceptance_length": speculation.acceptance_length if speculation.num_drafts else 0.0,
        "spec_decode_num_drafts": speculation.num_drafts,
        "spec_decode_draft_tokens": speculation.num_draft_tokens,
        "spec_decode_accepted_tokens": speculation.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": position_rates(speculation),
        "spec_decode_num_steps": speculation.num_steps,
        "spec_decode_synthetic": speculation.synthetic,
        "num_preemptions": speculation.num_preemptions,
    }


def acceptance_rate(stats: SpecStats) -> float:
    """Share of the draft tokens that were accepted; 0 without any."""
    return stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0


def position_rates(stats: SpecStats) -> list[float]:
    """At each position the share of drafts (of any length) whose tokens up to there were all accepted."""
    return [accepted / stats.num_drafts for accepted in stats.accepted_per_position] if stats.num_drafts else []


def _most_at_once(records: Sequence[RequestRecord]) -> int:
    # Of an end and a start at the same time the end comes first.
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


def _most_tokens_in_a_second(records: Sequence[RequestRecord], start_s: float) -> int:
    seconds: Counter[int] = Counter()
    for record in records:
        for time_s, size in zip(record.chunk_times_s, record.chunk_sizes, strict=True):
            seconds[int(time_s - start_s)] += size
    return max(seconds.values(), default=0)
