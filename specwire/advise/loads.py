"""The measurements of whole requests: plain decoding alone and at full load, and pairs of runs at a rate."""

import asyncio
import math
import secrets
import time
from collections.abc import Sequence

from specwire.advise.online import OnlineRate, OnlineRun
from specwire.advise.options import AdviseOptions
from specwire.advise.workload import PlainRun, Rate
from specwire.bench.arrivals import arrival_times
from specwire.bench.backend import grpc_backend
from specwire.bench.metrics import ServeMetrics, measure
from specwire.bench.progress import show_progress
from specwire.bench.record import RequestRecord
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.workload import Prompt, repeat
from specwire.client import AsyncClient
from specwire.errors import SpecwireError

_ALONE = 3
"""Requests one after the other."""
_ROUNDS = 2
"""Requests of a full load, by how many run at once."""
_MIN_REQUESTS, _MAX_REQUESTS = 6, 5000
"""At a rate."""


class Loads:
    """Runs them on one coordinator.

    Args:
        concurrency: requests at once under full load.
        stop: set by Ctrl-C; whatever runs then gives None.
    """

    def __init__(self, client: AsyncClient, options: AdviseOptions, concurrency: int, stop: asyncio.Event) -> None:
        self._client = client
        self._options = options
        self._concurrency = concurrency
        self._stop = stop

    async def plain(self, prompts: Sequence[Prompt]) -> tuple[PlainRun, PlainRun, PlainRun] | None:
        """Plain decoding of one request at a time, of a few, and of as many as run at once."""
        found = []
        some = round(math.sqrt(self._concurrency))
        for concurrency in (1, some, self._concurrency):
            number = max(_ROUNDS * concurrency, _ALONE)
            chosen = [prompts[index * len(prompts) // number] for index in range(number)] if number < len(prompts) else repeat(prompts, number)
            run = await self._run(f"plain, {concurrency} at once", chosen, None, 0, concurrency)
            if run is None:
                return None
            metrics = _check(run)
            e2el_ms = metrics.e2el_ms.median if metrics.e2el_ms else 0.0
            found.append(PlainRun(concurrency, metrics.request_throughput, metrics.output_throughput, _tpot_ms(metrics), e2el_ms / 1000))
        return found[0], found[1], found[2]

    async def at(self, rate: Rate, prompts: Sequence[Prompt], k: int) -> OnlineRate | None:
        """Pairs of runs without and with K drafts, each pair with arrivals of its own, and in turns the one or the other first."""
        number = min(_MAX_REQUESTS, max(_MIN_REQUESTS, math.ceil(rate.requests_per_s * self._options.online_s)))
        pairs = []
        for index in range(self._options.repeats):
            arrivals_s = arrival_times(number, rate.requests_per_s, 1.0, (self._options.accept.params.seed or 0) + index)
            chosen = repeat(prompts, number, first=index * number)
            runs: dict[int, OnlineRun] = {}
            for most in (0, k) if index % 2 == 0 else (k, 0):
                run = await self._run(f"{rate.name} rate, {most} drafts", chosen, arrivals_s, most, self._concurrency)
                if run is None:
                    return None
                metrics = _check(run)
                tpots_ms = [1e3 * tpot_s for record in run.records if (tpot_s := record.tpot_s) is not None]
                ttft_ms = metrics.ttft_ms.median if metrics.ttft_ms else 0.0
                runs[most] = OnlineRun(_tpot_ms(metrics), ttft_ms, metrics.output_throughput, tuple(tpots_ms))
            pairs.append((runs[0], runs[k]))
        return OnlineRate(rate.name, rate.requests_per_s, number, k, tuple(pairs))

    async def _run(self, label: str, prompts: Sequence[Prompt], arrivals_s: Sequence[float] | None, k: int, concurrency: int) -> LoadRun | None:
        accept = self._options.accept
        name = f"advise-{secrets.token_hex(4)}"
        # A key of its own: what earlier runs left in caches, and with drafters that know past answers, would make this one look better.
        send = grpc_backend(
            self._client,
            accept.params.replace(max_draft_tokens=k),
            label=name,
            timeout_s=accept.timeout_s,
            max_retries=accept.max_retries,
            tenant_cache_key=secrets.token_bytes(8),
        )
        with show_progress(label, len(prompts), says_start=True) as ended:
            generator = LoadGenerator(send, time.perf_counter, max_concurrency=concurrency, on_end=ended)
            run = await generator.run(prompts, arrivals_s, self._stop)
        return None if run.interrupted else run


def _check(run: LoadRun) -> ServeMetrics:
    """The figures. Raises SpecwireError if requests failed."""
    failed: list[RequestRecord] = [record for record in run.records if not record.is_ok]
    if failed:
        raise SpecwireError(f"{len(failed)} of {len(run.records)} requests under load failed ({failed[0].error}: {failed[0].error_text})")
    return measure(run, (50.0,))


def _tpot_ms(metrics: ServeMetrics) -> float:
    """Median over the requests. Raises SpecwireError where no answer has two tokens."""
    if metrics.tpot_ms is None or not metrics.tpot_ms.median > 0:
        raise SpecwireError("no answer has two tokens, so that there is no time per token; ask for longer ones (--output-len, --ignore-eos)")
    return metrics.tpot_ms.median
