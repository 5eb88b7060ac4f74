"""Coordinator, verifier and drafter count the same things on their own: over real gRPC, a tiny model and n-gram lookup, their metrics add up."""

from pathlib import Path

import pytest
import torch

from coordinator import exposition
from coordinator.engine import Engine
from drafter_svc import metrics as drafter_metrics
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.helpers import serve_drafter
from tests.metrics.scrape import Series, make_scraper, value
from tests.scripted.collect import CollectingSink
from tests.verifier.harness import make_verifier, serve, tiny_model
from verifier_svc import metrics as verifier_metrics

COORDINATOR, VERIFIER, DRAFTER = "specwire_coordinator_", "specwire_verifier_", "specwire_drafter_"


@pytest.fixture
async def scraped(socket_dir: Path) -> tuple[Series, Series, Series, str, str]:
    """What the three say after eight requests, and the addresses of verifier and drafter."""
    torch.set_num_threads(1)
    speculative = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1)
    drafter_config = DrafterConfig(speculative_config=speculative)
    async with serve(make_verifier(tiny_model()), socket_dir) as served, serve_drafter(socket_dir, drafter_config) as drafter:
        addresses = served.address, drafter.addresses[0]
        config = CoordinatorConfig(
            verifiers=addresses[:1], drafters=addresses[1:], max_num_seqs=4, min_draft_wait_ms=10_000, speculative_config=speculative
        )
        engine = Engine(config)
        await engine.start()
        while not engine.ready.is_ready:
            await engine.readiness_changed()
        sinks = [CollectingSink() for _ in range(8)]
        for index, sink in enumerate(sinks):
            sampling = SamplingParams(temperature=0.0, max_tokens=20 + index, ignore_eos=True)
            engine.submit(GenerateRequest([5, 17, 33, 5, 17, 33, 5 + index], sampling), sink)
        for sink in sinks:
            await sink.wait()
        scrapes = (
            make_scraper(exposition.METRICS, lambda: exposition.collect(engine))(),
            make_scraper(verifier_metrics.METRICS, served.server.metrics.collect)(),
            make_scraper(drafter_metrics.METRICS, drafter.worker.metrics.collect)(),
        )
        await engine.stop(0)
    return *scrapes, *addresses


async def test_the_services_agree(scraped: tuple[Series, Series, Series, str, str]) -> None:
    coordinator, verifier, drafter, verifier_address, drafter_address = scraped
    assert value(coordinator, f"{COORDINATOR}verified_tokens_total") == value(verifier, f"{VERIFIER}draft_tokens_total") > 0
    assert value(coordinator, f"{COORDINATOR}accepted_tokens_total") == value(verifier, f"{VERIFIER}accepted_tokens_total") > 0
    proposed = value(coordinator, f"{COORDINATOR}draft_tokens_total", drafter=drafter_address)
    assert proposed == value(drafter, f"{DRAFTER}draft_tokens_total") >= value(verifier, f"{VERIFIER}draft_tokens_total")
    assert value(coordinator, f"{COORDINATOR}draft_reply_seconds_count", drafter=drafter_address) == value(drafter, f"{DRAFTER}rounds_total")
    # A round that only closes slots may be under way.
    num_rounds = value(coordinator, f"{COORDINATOR}step_seconds_count", verifier=verifier_address)
    assert 0 <= value(verifier, f"{VERIFIER}rounds_total") - num_rounds <= 2
    assert value(coordinator, f"{COORDINATOR}rows_total") == sum(count for (name, _), count in verifier.items() if name == f"{VERIFIER}rows_total")


async def test_a_steps_parts_come_from_the_services_own_times(scraped: tuple[Series, Series, Series, str, str]) -> None:
    coordinator, verifier, drafter, verifier_address, drafter_address = scraped
    step, part = f"{COORDINATOR}step_seconds", f"{COORDINATOR}step_part_seconds"
    forward_s = value(coordinator, f"{part}_sum", verifier=verifier_address, part="forward")
    assert 0 < forward_s <= value(verifier, f"{VERIFIER}forward_seconds_sum")
    parts_s = sum(count for (name, _), count in coordinator.items() if name == f"{part}_sum")
    assert parts_s == pytest.approx(value(coordinator, f"{step}_sum", verifier=verifier_address), abs=1e-9)
    for service, address, num in (
        ("verifier", verifier_address, value(coordinator, f"{step}_count", verifier=verifier_address)),
        ("drafter", drafter_address, value(drafter, f"{DRAFTER}rounds_total")),
    ):
        assert value(coordinator, f"{COORDINATOR}hop_seconds_count", service=service, address=address) == num
        assert value(coordinator, f"{COORDINATOR}hop_seconds_sum", service=service, address=address) > 0
    assert value(coordinator, f"{COORDINATOR}draft_reply_seconds_sum", drafter=drafter_address) > value(drafter, f"{DRAFTER}drafting_seconds_sum")
