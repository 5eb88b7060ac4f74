"""The measurements: the prompts' acceptance, then the time of steps at a few batch sizes and K."""

import asyncio
import json
import logging
import math
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specwire.advise.options import AdviseOptions
from specwire.advise.steps import StepPoint
from specwire.bench.backend import grpc_backend
from specwire.bench.progress import show_progress
from specwire.bench.record import RequestRecord
from specwire.bench.runner import LoadGenerator, LoadRun, Send
from specwire.bench.workload import Prompt
from specwire.client import AsyncClient
from specwire.errors import FailedPreconditionError, SpecwireError
from specwire.messages import CoordinatorStatus
from specwire.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_LONGEST_GAP = 4.0
"""A chunk that came later than so many medians of its run was held up by something else, such as a prefill chunk."""


@dataclass(frozen=True, slots=True)
class StepRun:
    """One run of as many equal requests as there are at once; repeat: its number among equal ones."""

    repeat: int
    concurrency: int
    num_requested: int
    records: list[RequestRecord]


def hidden_drafts(status: CoordinatorStatus) -> list[str]:
    """What of the coordinator's configuration hides drafts from a measurement, one sentence each."""
    settings = {setting.key: json.loads(setting.value) for setting in status.speculation}
    found = []
    if settings.get("enable_adaptive_verification"):
        found.append("the stack verifies adaptively: it hides drafts that it does not take for good; switch that off while this measures")
    if len({entry[2] for entry in settings.get("num_speculative_tokens_per_batch_size") or ()}) > 1:
        found.append("the stack has a schedule by batch size, which hides drafts: leave it out while this measures")
    return found


class Measuring:
    """Measures one coordinator.

    Args:
        status: of the coordinator, ready.
        stop: set by Ctrl-C.

    Raises:
        FailedPreconditionError: it drafts nothing.
    """

    def __init__(self, client: AsyncClient, options: AdviseOptions, status: CoordinatorStatus, stop: asyncio.Event) -> None:
        self._client = client
        self._options = options
        self._stop = stop
        self.most = status.num_speculative_tokens
        self.num_lanes = sum(lane.is_ready for lane in status.lanes)
        self._room = status.max_num_seqs * self.num_lanes
        if not self.most or not any(drafter.is_connected for drafter in status.drafters):
            raise FailedPreconditionError(
                "the coordinator drafts nothing, so that there is nothing to measure; start it with a drafter, and with "
                "num_speculative_tokens as large as you would ever want it"
            )

    async def acceptance(self, prompts: Sequence[Prompt]) -> LoadRun:
        """All prompts, with as many drafts as the coordinator takes."""
        with show_progress("acceptance", len(prompts), says_start=True) as ended:
            send = self._backend(self._options.accept.params, tenant_cache_key=secrets.token_bytes(8))
            limit = self._options.accept.max_concurrency
            generator = LoadGenerator(send, time.perf_counter, max_concurrency=limit, keep_tokens=True, on_end=ended)
            return await generator.run(prompts, None, self._stop)

    def concurrencies(self) -> list[int]:
        """At which steps are measured."""
        wanted = self._options.concurrencies or tuple(4**power for power in range(8))
        fitting = [concurrency for concurrency in wanted if concurrency <= self._room]
        if self._options.concurrencies and len(fitting) < len(wanted):
            logger.warning("--concurrency is cut: only %d sequences run at once", self._room)
        lanes = self.num_lanes
        return sorted({max(lanes, concurrency - concurrency % lanes) for concurrency in fitting or [self._room]})

    async def steps(self, prompts: Sequence[Prompt]) -> list[StepRun]:
        """Runs at all batch sizes with K = 0, 1 and the largest, one after the other and all over again, so that what changes meanwhile changes
        all of them. Stops early when told to."""
        runs: list[StepRun] = []
        sizes, ks = self.concurrencies(), sorted({0, 1, self.most})
        params = self._options.accept.params.replace(ignore_eos=True)
        with show_progress("steps", self._options.repeats * len(ks) * sum(sizes), says_start=True) as ended:
            for repeat in range(self._options.repeats):
                for concurrency in sizes:
                    chosen = [prompts[index * len(prompts) // concurrency] for index in range(concurrency)]
                    chosen = [replace(prompt, max_tokens=self._options.step_len) for prompt in chosen]
                    for k in ks:
                        send = self._backend(params.replace(max_draft_tokens=k))
                        run = await LoadGenerator(send, time.perf_counter, max_concurrency=concurrency, on_end=ended).run(chosen, None, self._stop)
                        if run.interrupted:
                            return runs
                        runs.append(StepRun(repeat, concurrency, k, run.records))
        return runs

    def _backend(self, params: SamplingParams, tenant_cache_key: bytes = b"") -> Send:
        accept = self._options.accept
        return grpc_backend(
            self._client,
            params,
            label=f"advise-{secrets.token_hex(4)}",
            timeout_s=accept.timeout_s,
            max_retries=accept.max_retries,
            report_drafts=True,
            tenant_cache_key=tenant_cache_key,
        )


def step_points(runs: Sequence[StepRun], num_lanes: int) -> list[StepPoint]:
    """What the runs of equal batch size and K say. K is the most drafts that a step verified: a schedule of the coordinator may allow fewer than were
    asked for. Runs that were asked for drafts and verified none are left out. Both are logged.

    With K = 0 the median counts. With drafts it is the median of the ratios to the runs without them just before, which other load on the machine
    changes less than the times themselves.

    Raises:
        SpecwireError: requests failed.
    """
    plain: dict[tuple[int, int], float] = {}
    groups: dict[tuple[int, int], tuple[StepPoint, list[float]]] = {}
    limited: set[tuple[int, int]] = set()
    for run in runs:
        point, kind = _point(run, num_lanes), (run.concurrency, run.num_requested)
        if point.num_requested < run.num_requested and kind not in limited:
            limited.add(kind)
            logger.warning(
                "with %d requests at once and %d drafts asked for, steps verified %d at most; if not for want of good drafts, leave "
                "num_speculative_tokens_per_batch_size and adaptive verification out while this measures",
                run.concurrency, run.num_requested, point.num_requested,
            )  # fmt: skip
        if not run.num_requested:
            plain[run.concurrency, run.repeat] = point.step_ms
        elif not point.num_requested:
            continue
        relative = point.step_ms / plain[run.concurrency, run.repeat] if run.num_requested else point.step_ms
        groups.setdefault((point.num_sequences, point.num_requested), (point, []))[1].append(relative)
    medians = {key: statistics.median(values) for key, (_, values) in groups.items()}
    return [
        replace(
            point,
            step_ms=medians[size, k] * (medians[size, 0] if k else 1.0),
            spread=(max(values) - min(values)) / medians[size, k],
        )
        for (size, k), (point, values) in groups.items()
    ]


def _point(run: StepRun, num_lanes: int) -> StepPoint:
    done = [record for record in run.records if record.is_ok and record.spec is not None and len(record.chunk_sizes) > 1]
    if len(done) < len(run.records):
        errors = {f"{record.error}: {record.error_text}" for record in run.records if not record.is_ok}
        remedy = f" ({min(errors)})" if errors else "; give a longer --step-len: where steps are faster than the client, a chunk holds many of them"
        raise SpecwireError(
            f"{len(run.records) - len(done)} of {len(run.records)} requests at once failed or gave one chunk only, so that steps can't be measured"
            + remedy
        )
    specs = [record.spec for record in done if record.spec is not None]
    num_steps = sum(max(1, spec.num_steps - 1) for spec in specs)
    num_drafted = sum(spec.num_drafts for spec in specs)
    num_gaps = sum(len(record.chunk_sizes) - 1 for record in done)
    # Where the client was slow, several steps' tokens came as one chunk.
    step_ms = 1e3 * _mean_gap_s(done) * num_gaps / num_steps
    context_len = statistics.mean(record.num_prompt_tokens + record.num_output_tokens / 2 for record in done)
    return StepPoint(
        num_sequences=math.ceil(run.concurrency / num_lanes),
        num_requested=max((count for record in done if record.drafts for count in record.drafts.num_draft_tokens), default=0),
        share=min(1.0, num_drafted / num_steps),
        num_drafts=sum(spec.num_draft_tokens for spec in specs) / max(1, num_drafted),
        step_ms=step_ms,
        context_len=round(context_len),
    )


def _mean_gap_s(records: Sequence[RequestRecord]) -> float:
    """Of chunks that came while all requests were decoding, as far as there are any; without those that were held up."""
    first = max(record.chunk_times_s[0] for record in records)
    last = min(record.chunk_times_s[-1] for record in records)
    everything = [(start, start + gap) for record in records for start, gap in zip(record.chunk_times_s, record.chunk_gaps_s, strict=False)]
    gaps = [end - start for start, end in everything if first <= start and end <= last]
    if len(gaps) < len(records):
        gaps = [end - start for start, end in everything]
    limit = _LONGEST_GAP * statistics.median(gaps)
    return statistics.mean(gap for gap in gaps if gap <= limit)
