"""Nothing that counts ever goes backwards: scraped all the time, under random traffic and every fault that scripted services know."""

import asyncio
import threading
import urllib.request

from coordinator import exposition
from specwire.metrics import MetricsServer
from tests.coordinator.test_random_steps import SCHEDULE, Storm, check
from tests.metrics.scrape import Series, check_growth, make_scraper, parse, value
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import GARBAGE, DrafterScript
from tests.scripted.verifier import VerifierScript

NUM_STEPS = 400
PREFIX = "specwire_coordinator_"


class Scraper(threading.Thread):
    """Reads an endpoint again and again until stopped; keeps what it read."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.scrapes: list[Series] = []
        self.error: Exception | None = None
        self._url = f"http://{address}/metrics"

    def run(self) -> None:
        try:
            while not self.stopped.wait(0.02):
                with urllib.request.urlopen(self._url, timeout=60) as response:
                    self.scrapes.append(parse(response.read().decode()))
        except Exception as error:
            self.error = error


async def test_counters_histograms_and_sums_only_grow() -> None:
    drafters = [DrafterScript(garbage=GARBAGE), DrafterScript(acceptance=0.5, max_model_len=100, max_num_seqs=6, max_num_draft_tokens=3)]
    async with Cluster([VerifierScript()] * 2, drafters, k=4, schedule=SCHEDULE, min_draft_wait_ms=2, max_queue=16, max_stream_backlog=16) as cluster:
        await cluster.all_there()
        server = MetricsServer("127.0.0.1:0", exposition.METRICS, lambda: exposition.collect(cluster.engine))
        server.start()
        scraper = Scraper(server.address)
        scraper.start()
        scrape = make_scraper(exposition.METRICS, lambda: exposition.collect(cluster.engine))
        before = scrape()
        storm = Storm(cluster, seed=5)
        while cluster.num_steps < NUM_STEPS:
            for _ in range(10):
                await storm.act()
                storm.live = [request for request in storm.live if not request.sink.ended]
                num_steps = cluster.num_steps
                await asyncio.sleep(0)
                async with asyncio.timeout(20):
                    await cluster.until(lambda num_steps=num_steps: cluster.num_steps > num_steps or not storm.is_moving)  # type: ignore[misc]
            now = scrape()
            check_growth(exposition.METRICS, before, now)
            before = now
        await storm.heal()
        ends = [await check(request) for request in storm.requests]
        scraper.stopped.set()
        await asyncio.to_thread(scraper.join)
        await server.stop()
        last = scrape()
        check_growth(exposition.METRICS, before, last)
    assert scraper.error is None
    assert scraper.scrapes
    for earlier, later in zip(scraper.scrapes, [*scraper.scrapes[1:], last], strict=True):
        check_growth(exposition.METRICS, earlier, later)
    # The storm has raged, and the sums are right after all of it.
    counters = cluster.engine.counters
    assert min(counters.num_verifier_losses, counters.num_drafter_losses, counters.num_accepted_tokens, storm.num_cancels) > 0
    choices = [choice for request in storm.requests for choice in request.sink.choices]
    assert value(last, f"{PREFIX}requests_total") == value(last, f"{PREFIX}request_seconds_count") == len(ends)
    assert value(last, f"{PREFIX}generated_tokens_total") == value(last, f"{PREFIX}sequence_tokens_sum") == sum(len(c.token_ids) for c in choices)
    assert sum(count for (name, _), count in last.items() if name == f"{PREFIX}sequences_total") == len(choices)
