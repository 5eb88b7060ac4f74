"""Every figure of a run whose times are known, beside what comes out by hand."""

import asyncio
import io

import pytest
from rich.console import Console

from specwire.bench.metrics import ServeMetrics, add_stats, measure, to_figures
from specwire.bench.report import print_serve
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.statistics import Distribution, Objective
from specwire.messages import SpecStats
from tests.bench.fake_backend import Answer, Refused, fake_backend, prompts
from tests.bench.virtual_time import run_virtual

# One after the other, due at 0, 1, 2, 3 and 8 s:
#   0: sent 0, tokens at 0.5 (1), 1.0 (3), 2.0 (2); due 0  -> TTFT 0.5, E2E 2, TPOT 1.5 / 5 = 0.3
#   1: sent 2, token at 2.25 (1);                   due 1  -> TTFT 1.25, E2E 1.25, no TPOT
#   2: sent 2.25, tokens at 2.75 (2), 3.75 (2);     due 2  -> TTFT 0.75, E2E 1.75, TPOT 1 / 3
#   3: sent 3.75, fails at 4.25 after 1 token
#   4: sent 8 on time, tokens at 8.5 (1), 9.0 (3), 10.0 (2)
ANSWERS = [
    Answer([(0.5, 1), (0.5, 3), (1.0, 2)], SpecStats(2, 6, 3, (2, 1, 0), num_steps=3), num_cached_tokens=2),
    Answer([(0.25, 1)], SpecStats(num_steps=1)),
    Answer([(0.5, 2), (1.0, 2)], SpecStats(2, 3, 2, (1, 1), num_steps=2, num_preemptions=1), num_cached_tokens=1),
    Answer([(0.5, 1)], error=Refused("no")),
    Answer([(0.5, 1), (0.5, 3), (1.0, 2)], SpecStats(2, 6, 3, (2, 1, 0), num_steps=3)),
]
ARRIVALS_S = [0.0, 1.0, 2.0, 3.0, 8.0]


@pytest.fixture(scope="module")
def result() -> LoadRun:
    async def main() -> LoadRun:
        generator = LoadGenerator(fake_backend(ANSWERS), asyncio.get_running_loop().time, max_concurrency=1)
        return await generator.run(prompts(5), ARRIVALS_S)

    return run_virtual(main())  # type: ignore[no-any-return]


@pytest.fixture
def metrics(result: LoadRun) -> ServeMetrics:
    return measure(result, (50, 90, 100), Objective(ttft_ms=750, tpot_ms=300))


def close(*values: float) -> object:
    return pytest.approx(values, rel=1e-12, abs=1e-9)


def figures(distribution: Distribution | None) -> tuple[float, ...]:
    assert distribution is not None
    return (distribution.count, distribution.mean, distribution.median, distribution.std, distribution.max)


def test_counts_and_throughput(metrics: ServeMetrics) -> None:
    assert (metrics.num_completed, metrics.num_failed, metrics.num_interrupted, metrics.errors) == (4, 1, 0, {"Refused": 1})
    assert (metrics.total_input_tokens, metrics.total_output_tokens, metrics.total_cached_tokens) == (16, 17, 3)
    assert metrics.duration_s == 10
    assert (metrics.request_throughput, metrics.output_throughput, metrics.total_token_throughput) == (0.4, 1.7, 3.3)
    # In [2, 3) come 2 + 1 + 2 tokens, more than in any other second.
    assert (metrics.max_output_tokens_per_s, metrics.max_concurrent_requests) == (5, 1)


def test_latencies(metrics: ServeMetrics) -> None:
    assert figures(metrics.ttft_ms) == close(4, 750, 625, 1000 * (0.375 / 4) ** 0.5, 1250)  # 500 1250 750 500
    assert figures(metrics.e2el_ms) == close(4, 1750, 1875, 1000 * (0.375 / 4) ** 0.5, 2000)  # 2000 1250 1750 2000
    mean = (300 + 1000 / 3 + 300) / 3
    assert figures(metrics.tpot_ms) == close(3, mean, 300, ((2 * (300 - mean) ** 2 + (1000 / 3 - mean) ** 2) / 3) ** 0.5, 1000 / 3)
    assert figures(metrics.itl_ms) == close(5, 800, 1000, (3 * 200**2 / 5 + 2 * 300**2 / 5) ** 0.5, 1000)  # 500 1000 1000 500 1000
    assert figures(metrics.wait_ms) == close(4, 312.5, 125, (1_000_000 / 4 + 62_500 / 4 - 312.5**2) ** 0.5, 1000)  # 0 1000 250 0
    # By token: 3 x 500/3, 2 x 500 (twice); one that came with the first one: 0, then 2 x 500.
    gaps = [500 / 3] * 6 + [500] * 4 + [0] + [500] * 2
    mean = sum(gaps) / 13
    assert figures(metrics.token_itl_ms) == close(13, mean, 500 / 3, (sum((gap - mean) ** 2 for gap in gaps) / 13) ** 0.5, 500)
    assert sum(gaps) == pytest.approx(1500 + 1000 + 1500)  # from first to last chunk


def test_percentiles(metrics: ServeMetrics) -> None:
    """Linear interpolation: rank p/100 x (n - 1)."""
    assert metrics.ttft_ms is not None
    assert dict(metrics.ttft_ms.percentiles) == {50: 625, 90: pytest.approx(750 + 0.7 * 500), 100: 1250}


def test_goodput(result: LoadRun, metrics: ServeMetrics) -> None:
    """0 and 4 meet both limits; 1 has a late first token; 2 is too slow; 3 failed."""
    assert metrics.request_goodput == 0.2
    for objective, good in ((Objective(ttft_ms=750), 3), (Objective(tpot_ms=0), 1), (Objective(e2el_ms=1749.9), 1), (Objective(e2el_ms=2000), 4)):
        assert measure(result, (50,), objective).request_goodput == good / 10
    assert measure(result, (50,)).request_goodput is None


def test_speculation(metrics: ServeMetrics) -> None:
    assert metrics.speculation == SpecStats(6, 15, 8, (5, 3, 0), num_steps=9, num_preemptions=1)
    figures = to_figures(metrics)
    assert figures["spec_decode_acceptance_rate"] == pytest.approx(100 * 8 / 15)
    assert figures["spec_decode_acceptance_length"] == pytest.approx(1 + 8 / 6)
    assert figures["spec_decode_per_position_acceptance_rates"] == pytest.approx([5 / 6, 3 / 6, 0])
    assert (figures["spec_decode_num_drafts"], figures["spec_decode_draft_tokens"], figures["spec_decode_accepted_tokens"]) == (6, 15, 8)


def test_figures_have_the_names_of_vllm(metrics: ServeMetrics) -> None:
    figures = to_figures(metrics)
    assert {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
        "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    } <= set(figures)  # fmt: skip
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p100")} <= set(figures)


def test_nothing_succeeded() -> None:
    async def main() -> LoadRun:
        return await LoadGenerator(fake_backend([Answer([], error=Refused("no"))]), asyncio.get_running_loop().time).run(prompts(2), [0.0, 0.0])

    metrics = measure(run_virtual(main()), (50,), Objective(ttft_ms=1))
    assert (metrics.num_failed, metrics.ttft_ms, metrics.request_goodput, metrics.output_throughput) == (2, None, 0.0, 0.0)
    assert to_figures(metrics)["spec_decode_acceptance_length"] == 0.0


def test_nothing_was_sent() -> None:
    metrics = measure(LoadRun([], 0.0, 0.0, interrupted=True), (50,), Objective(ttft_ms=1))
    assert (metrics.num_completed, metrics.max_concurrent_requests, metrics.request_throughput, metrics.e2el_ms) == (0, 0, 0.0, None)


def test_peak_concurrency_does_not_count_what_ends_as_another_starts() -> None:
    async def main() -> LoadRun:
        generator = LoadGenerator(fake_backend([Answer([(1.0, 1)])]), asyncio.get_running_loop().time)
        return await generator.run(prompts(5), [0.0, 0.5, 1.0, 1.25, 4.0])

    assert measure(run_virtual(main()), (50,)).max_concurrent_requests == 3  # at 1.25: those of 0.5, 1.0 and 1.25


def test_statistics_of_different_k_add_up() -> None:
    assert add_stats([SpecStats(1, 2, 1, (1,)), SpecStats(2, 6, 4, (2, 1, 1), synthetic=True)]) == SpecStats(3, 8, 5, (3, 1, 1), synthetic=True)
    assert add_stats([]) == SpecStats()


@pytest.mark.parametrize(("tells", "said"), [(True, "acceptance length"), (False, "speculation: not known, since the server does not tell")])
def test_what_a_server_does_not_tell_is_not_called_nothing(metrics: ServeMetrics, tells: bool, said: str) -> None:
    console = Console(file=io.StringIO(), width=120)
    print_serve(console, metrics, [("server", "s")], tells_speculation=tells)
    assert said in console.file.getvalue()  # type: ignore[attr-defined]
