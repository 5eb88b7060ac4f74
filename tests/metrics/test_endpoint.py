"""The HTTP endpoint: what it serves, where, and what happens when it can't."""

import asyncio
import socket
import urllib.request

import pytest

from specwire.errors import UnavailableError
from specwire.metrics import Histogram, Kind, Metric, Sample
from specwire.metrics.endpoint import Collector, start_endpoint
from tests.metrics.scrape import parse

ROUNDS = Metric("specwire_test_rounds_total", Kind.COUNTER, "rounds", ("lane",))
OPEN = Metric("specwire_test_open", Kind.GAUGE, "open ones")
TIME = Metric("specwire_test_time_seconds", Kind.HISTOGRAM, "time")
METRICS = (ROUNDS, OPEN, TIME)


def get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return response.read().decode()


async def test_values_are_read_at_each_scrape() -> None:
    histogram, numbers = Histogram((1_000_000_000,)), [3]
    samples = lambda: [Sample(ROUNDS, ("a:1",), numbers[0]), Sample(OPEN, (), 0), Sample(TIME, (), histogram)]  # noqa: E731
    endpoint = start_endpoint("127.0.0.1:0", Collector(METRICS, samples))
    try:
        first = parse(await asyncio.to_thread(get, endpoint.address))
        numbers[0] += 1
        histogram.observe(500_000_000)
        second = parse(await asyncio.to_thread(get, endpoint.address))
    finally:
        await endpoint.stop()
    assert first["specwire_test_rounds_total", (("lane", "a:1"),)] == 3
    assert second["specwire_test_rounds_total", (("lane", "a:1"),)] == 4
    assert (first["specwire_test_time_seconds_count", ()], second["specwire_test_time_seconds_count", ()]) == (0, 1)
    assert second["specwire_test_time_seconds_sum", ()] == 0.5
    assert second["specwire_test_time_seconds_bucket", (("le", "1.0"),)] == 1
    # A registry of its own: nothing of the library's global one is served.
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name, _ in second} == {metric.name for metric in METRICS}


async def test_an_address_in_use_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"{address}.*choose another metrics_listen"):
            start_endpoint(address, Collector((), list))


async def test_a_host_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnavailableError, match=r"cannot serve metrics on 192\.0\.2\.1:0"):
        start_endpoint("192.0.2.1:0", Collector((), list))


async def test_it_stops_and_frees_its_port() -> None:
    endpoint = start_endpoint("127.0.0.1:0", Collector((), list))
    await endpoint.stop()
    again = start_endpoint(endpoint.address, Collector((), list))
    await again.stop()


async def test_strangers_who_say_nothing_are_hung_up_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Each would hold a thread."""
    monkeypatch.setattr("specwire.metrics.endpoint._SILENCE_S", 0.2)
    endpoint = start_endpoint("127.0.0.1:0", Collector(METRICS, lambda: [Sample(OPEN, (), 0)]))
    try:
        host, _, port = endpoint.address.rpartition(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        strangers[0][1].write(b"GET /met")
        async with asyncio.timeout(30):
            for reader, writer in strangers:
                assert await reader.read() == b""
                writer.close()
        assert "specwire_test_open" in await asyncio.to_thread(get, endpoint.address)
    finally:
        await endpoint.stop()
    assert capfd.readouterr().err == ""
