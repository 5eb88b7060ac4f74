"""Every number of the drafter against one that is counted by hand, on a scripted method."""

from collections.abc import Callable
from pathlib import Path

from drafter_svc import metrics
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.server import DrafterServer
from drafter_svc.session import SequencePool
from specwire.config import DrafterConfig
from specwire.engine.counts import PassCounts
from specwire.messages import DraftCommit, DraftRow, RowStatus, SlotRef
from specwire.rpc import open_channel
from tests.drafter.helpers import DraftClient, ScriptedMethod, draft_stream, open_request, serve_drafter
from tests.metrics.scrape import Series, by_name, check_growth, make_scraper, series_of, value
from tests.waiting import until

PREFIX = "specwire_drafter_"
EVERYTHING = {name for metric in metrics.METRICS for name in series_of(metric)}


def scraper(source: DrafterMetrics) -> Callable[[], Series]:
    return make_scraper(metrics.METRICS, source.collect)


def numbers(series: Series) -> dict[str, float]:
    """Those without labels, by the rest of their name; times only by their count."""
    plain = {name.removeprefix(PREFIX): count for (name, labels), count in series.items() if not labels}
    return {name: count for name, count in plain.items() if not name.endswith("_seconds_sum")}


def test_before_a_method_is_there_everything_is_zero() -> None:
    series = scraper(DrafterMetrics(SequencePool(7)))()
    assert {name for name, _ in series} == EVERYTHING
    assert {name: number for (name, _), number in series.items() if number} == {f"{PREFIX}max_sequences": 7}


async def test_rounds_rows_tokens_and_streams(socket_dir: Path) -> None:
    method = ScriptedMethod()
    method.num_behind = 3  # chunks of background work
    method.counts = PassCounts(num_graph_passes=7, num_eager_passes=3, num_tokens=161, num_padded_tokens=170, num_spared_rows=12)
    async with serve_drafter(socket_dir, DrafterConfig(max_num_seqs=2, prefill_chunk=50), lambda _: method) as server:
        scrape = scraper(server.worker.metrics)
        async with draft_stream(server.addresses[0]) as client:
            opens = [open_request([3, 4], slot=slot) for slot in range(3)]  # one more than there is room for
            answer = await client.ask(opens=opens, rows=[DraftRow(slot, 1, 2, 4) for slot in range(3)])
            await client.ask(commits=[DraftCommit(0, 1, 2, [5])], rows=[DraftRow(0, 1, 3, 2), DraftRow(1, 9, 2, 2)])
            await client.tell(closes=[SlotRef(1, 1)])
            await client.ask(rows=[DraftRow(0, 1, 3, 1)])
            await until(lambda: value(scrape(), f"{PREFIX}catch_up_tokens_total") == 150)
            during = scrape()
        await until(lambda: value(scrape(), f"{PREFIX}streams") == 0 and value(scrape(), f"{PREFIX}open_sequences") == 0)
        after = scrape()
    assert [row.status for row in answer.rows] == [RowStatus.OK, RowStatus.OK, RowStatus.OUT_OF_BLOCKS]
    assert numbers(during) == {
        "rounds_total": 3,
        "draft_tokens_total": 4 + 4 + 2 + 1,
        "catch_up_tokens_total": 3 * 50,
        "graph_passes_total": 7,
        "eager_passes_total": 3,
        "pass_tokens_total": 161,
        "padded_tokens_total": 170,
        "spared_rows_total": 12,
        "streams_opened_total": 1,
        "faults_total": 0,
        "unshared_feature_sources_total": 0,
        "failed_certificate_reloads_total": 0,
        "spans_total": 0,
        "lost_spans_total": 0,
        "bad_traceparents_total": 0,
        "ready": 1,
        "streams": 1,
        "open_sequences": 1,
        "max_sequences": 2,
        "drafting_seconds_count": 3,
        "queue_seconds_count": 3,
    }
    rows = {dict(labels)["status"]: count for labels, count in by_name(during, f"{PREFIX}rows_total").items()}
    assert rows == {"ok": 4, "stale": 1, "out_of_blocks": 1, "bad": 0, "catching_up": 0}
    check_growth(metrics.METRICS, during, after)


async def test_times_are_those_of_the_answers(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir, build=lambda _: ScriptedMethod()) as server, draft_stream(server.addresses[0]) as client:
        answers = [await client.ask(opens=[open_request([3, 4])], rows=[DraftRow(0, 1, 2, 4)])]
        answers += [await client.ask(rows=[DraftRow(0, 1, 2, 4)]) for _ in range(4)]
        series = scraper(server.worker.metrics)()
    timings = [answer.timing for answer in answers]
    assert value(series, f"{PREFIX}drafting_seconds_sum") == sum(timing.finished_ns - timing.started_ns for timing in timings) / 1e9
    assert value(series, f"{PREFIX}queue_seconds_sum") == sum(timing.started_ns - timing.received_ns for timing in timings) / 1e9


async def test_streams_that_come_and_go(socket_dir: Path) -> None:
    async with serve_drafter(socket_dir, build=lambda _: ScriptedMethod()) as server, open_channel(server.addresses[0]) as channel:
        scrape = scraper(server.worker.metrics)
        before, clients = scrape(), [DraftClient(channel, lane) for lane in range(3)]
        for client in clients:
            await client.hello()
        await clients[0].ask(opens=[open_request([3, 4])], rows=[DraftRow(0, 1, 2, 4)])
        await until(lambda: value(scrape(), f"{PREFIX}streams") == 3)
        for client in clients:
            client.cancel()
        await until(lambda: value(scrape(), f"{PREFIX}streams") == 0)
        again = DraftClient(channel)
        await again.hello()
        await until(lambda: value(scrape(), f"{PREFIX}streams_opened_total") == 4)
        check_growth(metrics.METRICS, before, scrape())
        assert value(scrape(), f"{PREFIX}draft_tokens_total") == 4
        again.cancel()


async def test_it_is_not_ready_before_its_method_is(socket_dir: Path) -> None:
    server = DrafterServer(DrafterConfig(listen=(f"unix:{socket_dir}/d",)), lambda _: ScriptedMethod(), cost_budget_s=0)
    scrape = scraper(server.worker.metrics)
    before = value(scrape(), f"{PREFIX}ready")
    await server.start()
    await server.wait_ready()
    assert (before, value(scrape(), f"{PREFIX}ready")) == (0, 1)
    assert await server.stop()
