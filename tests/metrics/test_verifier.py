"""Every number of the verifier against one that is counted by hand, on a tiny model."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch

from specwire.engine.models.decoder import Decoder
from specwire.messages import RowStatus, VerifyRound
from tests.metrics.scrape import Series, by_name, check_growth, make_scraper, series_of, value
from tests.verifier.harness import PROMPT, Rounds, Served, decode, describe, ends_with, make_verifier, open_message, prefill, serve, tiny_model
from tests.waiting import until
from verifier_svc import metrics
from verifier_svc.loading import LoadedVerifier
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.server import VerifierServer

PREFIX = "specwire_verifier_"
EVERYTHING = {name for metric in metrics.METRICS for name in series_of(metric)}


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_model()


def scraper(source: VerifierMetrics) -> Callable[[], Series]:
    return make_scraper(metrics.METRICS, source.collect)


def numbers(series: Series) -> dict[str, float]:
    """Those without labels, by the rest of their name."""
    return {name.removeprefix(PREFIX): count for (name, labels), count in series.items() if not labels}


def test_before_a_model_is_there_everything_is_zero() -> None:
    series = scraper(VerifierMetrics())()
    assert {name for name, _ in series} == EVERYTHING
    assert set(series.values()) == {0}


async def test_before_a_coordinator_is_there_only_the_capacity_is_not_zero(model: Decoder, socket_dir: Path) -> None:
    async with serve(make_verifier(model), socket_dir) as served:
        series = scraper(served.server.metrics)()
    assert {name for name, _ in series} == EVERYTHING
    assert {name: number for (name, _), number in series.items() if number} == {f"{PREFIX}ready": 1, f"{PREFIX}kv_blocks": 64}


async def test_rounds_rows_and_tokens(model: Decoder, socket_dir: Path) -> None:
    async with serve(make_verifier(model), socket_dir) as served:
        rounds, stream, scrape = Rounds(served.verifier), served.stream(), scraper(served.server.metrics)
        await stream.start()
        first = await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
        assert first is not None
        tokens = [*PROMPT, *first.rows[0].token_ids]
        truth = first.rows[0].token_ids[0]
        second = await stream.round_trip(rounds.build([decode(0, tokens, [truth, 1, 2])]))
        assert second is not None
        num_accepted = second.rows[0].num_accepted
        tokens += second.rows[0].token_ids
        # One row that is stale, one that is bad, one that is fine.
        rows = [decode(7, tokens), decode(0, tokens), prefill(1, 99)]
        third = await stream.round_trip(rounds.build(rows, opens=[open_message(1, [0, 9999])]))
        assert third is not None
        assert [row.status for row in third.rows] == [RowStatus.STALE, RowStatus.OK, RowStatus.BAD]
        series = scrape()
        assert numbers(series) == {
            "rounds_total": 3,
            "tokens_total": len(PROMPT) + 4 + 1,
            "padded_tokens_total": len(PROMPT) + 4 + 1,
            "draft_tokens_total": 3,
            "accepted_tokens_total": num_accepted,
            "prefix_cache_looked_up_tokens_total": len(PROMPT),
            "prefix_cache_hit_tokens_total": 0,
            "graph_rounds_total": 0,
            "eager_rounds_total": 3,
            "rows_sampled_outside_total": 0,
            "waits_total": 0,
            "sessions_total": 1,
            "takeovers_total": 0,
            "refused_sessions_total": 0,
            "faults_total": 0,
            "failed_certificate_reloads_total": 0,
            "spans_total": 0,
            "lost_spans_total": 0,
            "bad_traceparents_total": 0,
            "feature_bytes_total": 0,
            "feature_seconds_count": 0,
            "feature_seconds_sum": 0,
            "ready": 1,
            "held": 1,
            "open_sequences": 2,
            "kv_blocks": 64,
            "kv_blocks_used": 64 - third.free_blocks,
            "rounds_in_flight": 0,
            "forward_seconds_count": 3,
            "queue_seconds_count": 3,
            "forward_seconds_sum": sum(result.timing.finished_ns - result.timing.started_ns for result in (first, second, third)) / 1e9,
            "queue_seconds_sum": sum(result.timing.started_ns - result.timing.received_ns for result in (first, second, third)) / 1e9,
        }
        rows_by_status = {dict(labels)["status"]: count for labels, count in by_name(series, f"{PREFIX}rows_total").items()}
        assert rows_by_status == {"ok": 3, "stale": 1, "bad": 1, "out_of_blocks": 0, "catching_up": 0}
        stream.cancel()
        await until(lambda: served.verifier.num_open_slots == 0)
        after = scrape()
        check_growth(metrics.METRICS, series, after)
        assert (value(after, f"{PREFIX}held"), value(after, f"{PREFIX}open_sequences"), value(after, f"{PREFIX}kv_blocks_used")) == (0, 0, 0)


async def test_prefix_cache_hits(model: Decoder, socket_dir: Path) -> None:
    prompt = [5 + i % 40 for i in range(40)]
    async with serve(make_verifier(model), socket_dir) as served:
        rounds, stream = Rounds(served.verifier), served.stream()
        await stream.start()
        for slot in range(3):
            await stream.round_trip(rounds.build([prefill(slot, 99)], opens=[open_message(slot, prompt)]))
        series = scraper(served.server.metrics)()
        assert value(series, f"{PREFIX}prefix_cache_looked_up_tokens_total") == 3 * 40
        assert value(series, f"{PREFIX}prefix_cache_hit_tokens_total") == 2 * 32, "two whole blocks of 16, twice"
        assert value(series, f"{PREFIX}tokens_total") == 40 + 8 + 8
        stream.cancel()


async def test_without_a_prefix_cache_nothing_is_looked_up(model: Decoder, socket_dir: Path) -> None:
    async with serve(make_verifier(model, enable_prefix_cache=False), socket_dir) as served:
        rounds, stream = Rounds(served.verifier), served.stream()
        await stream.start()
        await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
        assert value(scraper(served.server.metrics)(), f"{PREFIX}prefix_cache_looked_up_tokens_total") == 0
        stream.cancel()


async def test_sessions_takeovers_refusals_and_faults(model: Decoder, socket_dir: Path) -> None:
    async with serve(make_verifier(model), socket_dir) as served:
        scrape, seen = scraper(served.server.metrics), []
        first, second, stranger = served.stream(), served.stream(incarnation=2), served.stream("somebody else")
        await first.start()
        await second.start()
        await ends_with(first, grpc.StatusCode.ABORTED, "taken over")
        await stranger.send(VerifyRound(1, 0, 0))
        await ends_with(stranger, grpc.StatusCode.FAILED_PRECONDITION, "holds this verifier")
        seen.append(scrape())
        await fault(served, second)
        await until(lambda: value(scrape(), f"{PREFIX}held") == 0)
        seen.append(scrape())
        again = served.stream(incarnation=3)
        await again.start()
        seen.append(scrape())
        again.cancel()
    for earlier, later in itertools.pairwise(seen):
        check_growth(metrics.METRICS, earlier, later)
    shown = [
        tuple(numbers(s)[name] for name in ("sessions_total", "takeovers_total", "refused_sessions_total", "faults_total", "held")) for s in seen
    ]
    assert shown == [(2, 1, 1, 0, 1), (2, 1, 1, 1, 0), (3, 1, 1, 1, 1)]


async def fault(served: Served, stream: object) -> None:
    """A round that fails for no reason of its own."""
    launch = served.verifier.launch

    def fail(request: VerifyRound) -> None:
        raise RuntimeError("the device is gone")

    served.verifier.launch = fail  # type: ignore[method-assign, assignment]
    await stream.send(VerifyRound(1, 0, 1))  # type: ignore[attr-defined]
    await ends_with(stream, grpc.StatusCode.INTERNAL)  # type: ignore[arg-type]
    served.verifier.launch = launch  # type: ignore[method-assign]


async def test_scrapes_while_the_model_loads(model: Decoder, socket_dir: Path) -> None:
    seen: list[Series] = []
    verifier = make_verifier(model)

    def load() -> LoadedVerifier:
        seen.append(scrape())
        return LoadedVerifier(verifier, describe(verifier), None)

    server = VerifierServer([f"unix:{socket_dir}/v"], load, "instance-1")
    scrape = scraper(server.metrics)
    await server.start()
    await asyncio.wait_for(server.load(), 10)
    assert (value(seen[0], f"{PREFIX}ready"), value(scrape(), f"{PREFIX}ready")) == (0, 1)
    await server.stop(1.0)
