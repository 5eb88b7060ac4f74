"""Calls of clients, and what is not let in: counted by kind, by status, and by what was wrong with a key."""

import contextlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator import exposition
from coordinator.counters import Counters
from coordinator.metrics import Metrics
from coordinator.readiness import Readiness
from coordinator.variants import Variants
from specwire.api_keys import hash_key, make_key
from specwire.client import AsyncClient
from specwire.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from specwire.messages import GenerateRequest
from specwire.rpc import open_channel
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1 import coordinator_pb2_grpc
from specwire.wire import generate
from tests.metrics.scrape import by_name, make_scraper, value
from tests.metrics.served import serve_cluster
from tests.metrics.test_coordinator import PREFIX, scraper


async def test_calls_and_refusals_by_kind(socket_dir: Path) -> None:
    async with serve_cluster(socket_dir) as served, open_channel(served.address) as channel:
        scrape = scraper(served.cluster)
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        good, bad = GenerateRequest([3, 4], SamplingParams(max_tokens=2)), GenerateRequest([3, 4], SamplingParams(max_tokens=10_000))
        assert [response async for response in stub.Generate(generate.pack_request(good))]
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [response async for response in stub.Generate(generate.pack_request(bad))]
        batch = pb.GenerateBatchRequest(requests=[generate.pack_request(request) for request in (good, bad, good)])
        assert len([response async for response in stub.GenerateBatch(batch)]) == 3
        async with AsyncClient(served.address) as client:
            await client.generate([3, 4], max_tokens=2)
            with pytest.raises(InvalidArgumentError):
                await client.generate([3, 4], max_tokens=10_000)
            during = scrape()
        await served.cluster.until(lambda: value(scrape(), f"{PREFIX}streams", kind="session") == 0)
        after = scrape()
    opened = {dict(labels)["kind"]: count for labels, count in by_name(after, f"{PREFIX}streams_opened_total").items()}
    assert opened == {"generate": 2, "session": 1, "batch": 1}
    assert value(during, f"{PREFIX}streams", kind="session") == 1
    assert set(by_name(after, f"{PREFIX}streams").values()) == {0}
    refused = {dict(labels)["code"]: count for labels, count in by_name(after, f"{PREFIX}refused_requests_total").items()}
    assert refused == {**dict.fromkeys(exposition.REFUSALS, 0), "invalid_argument": 3}
    assert value(after, f"{PREFIX}requests_total") == 4


async def test_a_batch_with_too_many_requests_is_counted_once(socket_dir: Path) -> None:
    async with serve_cluster(socket_dir, max_batch_requests=1) as served, open_channel(served.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        request = generate.pack_request(GenerateRequest([3, 4], SamplingParams(max_tokens=2)))
        with pytest.raises(grpc.aio.AioRpcError, match="max_batch_requests"):
            _ = [response async for response in stub.GenerateBatch(pb.GenerateBatchRequest(requests=[request, request, request]))]
        after = scraper(served.cluster)()
    assert value(after, f"{PREFIX}refused_requests_total", code="invalid_argument") == 1
    assert value(after, f"{PREFIX}requests_total") == 0


async def test_a_call_without_a_key_is_counted_alike_whatever_it_is(socket_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"[{{name: a, hash: {hash_key(make_key())}}}]")
    request = generate.pack_request(GenerateRequest([3, 4], SamplingParams(max_tokens=2)))
    async with serve_cluster(socket_dir, api_keys=str(file)) as served, open_channel(served.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        for call in (stub.Generate(request), stub.Session(iter(())), stub.GenerateBatch(pb.GenerateBatchRequest(requests=[request]))):
            with pytest.raises(grpc.aio.AioRpcError, match="API key"):
                _ = [response async for response in call]
        after = scraper(served.cluster)()
    assert value(after, f"{PREFIX}key_refusals_total", cause="no_key") == 3
    assert set(by_name(after, f"{PREFIX}refused_requests_total").values()) == {0}


async def test_refused_keys_and_files_that_cannot_be_used(socket_dir: Path, tmp_path: Path) -> None:
    file, (good, bad, limited) = tmp_path / "keys.yaml", (make_key() for _ in range(3))
    file.write_text(f"[{{name: a, hash: {hash_key(good)}}}, {{name: b, hash: {hash_key(limited)}, max_tokens_per_request: 3}}]")
    async with serve_cluster(socket_dir, api_keys=str(file)) as served:
        scrape = scraper(served.cluster)
        before = scrape()
        for key, error in ((good, None), (bad, UnauthenticatedError), ("", UnauthenticatedError), (limited, ResourceExhaustedError)):
            async with AsyncClient(served.address, api_key=key, max_retries=0) as client:
                with pytest.raises(error) if error else contextlib.nullcontext():
                    await client.generate([3, 4], max_tokens=9)
        await served.cluster.until(lambda: value(scrape(), f"{PREFIX}streams", kind="session") == 0)
        after = scrape()
    refusals = {dict(labels)["cause"]: count for labels, count in by_name(after, f"{PREFIX}key_refusals_total").items()}
    assert set(by_name(before, f"{PREFIX}key_refusals_total").values()) == {0}
    # Without a valid key a client fails at its first call, whatever it is.
    assert refusals == {"no_key": 1, "unknown_key": 1, "expired_key": 0, "over_limit": 1}
    assert value(after, f"{PREFIX}refused_requests_total", code="resource_exhausted") == 1
    assert set(by_name(after, f"{PREFIX}failed_reloads_total")) == {(("file", what),) for what in ("api_keys", "certificates", "peer_certificates")}


def test_what_the_server_counts_is_shown() -> None:
    metrics = Metrics()
    keys: Any = SimpleNamespace(num_refused=Counter(no_key=2, some_other_cause=3), num_failed_reloads=5)
    certificates: Any = SimpleNamespace(num_failed_reloads=7)
    connectors: Any = SimpleNamespace(num_failed_reloads=9)
    metrics.watch(keys, certificates)
    metrics.watch_peers(connectors)
    engine: Any = SimpleNamespace(
        metrics=metrics, counters=Counters(), description=None, lanes=[], calibration_statistics=(), ready=Readiness(False, ""), num_waiting=0,
        num_parked=0, variants=Variants(SpeculativeConfig(), 0)
    )  # fmt: skip
    series = make_scraper(exposition.METRICS, lambda: exposition.collect(engine))()
    assert value(series, f"{PREFIX}failed_reloads_total", file="api_keys") == 5
    assert value(series, f"{PREFIX}failed_reloads_total", file="certificates") == 7
    assert value(series, f"{PREFIX}failed_reloads_total", file="peer_certificates") == 9
    shown = {dict(labels)["cause"]: count for labels, count in by_name(series, f"{PREFIX}key_refusals_total").items()}
    assert shown == {"no_key": 2, "unknown_key": 0, "expired_key": 0, "over_limit": 0, "some_other_cause": 3}
