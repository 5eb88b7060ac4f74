"""The services as processes: metrics where the flag says, from the start, and a clear error where they can't be served."""

import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from specwire.config import CoordinatorConfig, DrafterConfig
from tests.integration.stack import Service
from tests.metrics.scrape import Series, parse, value


@pytest.fixture
def services(socket_dir: Path) -> Iterator[dict[str, Service]]:
    """A coordinator whose verifier never comes, and a drafter."""
    found = {
        "coordinator": Service(
            CoordinatorConfig(
                listen=(f"unix:{socket_dir}/c",),
                verifiers=(f"unix:{socket_dir}/v",),
                drafters=(f"unix:{socket_dir}/d",),
                metrics_listen="127.0.0.1:0",
            )
        ),
        "drafter": Service(DrafterConfig(listen=(f"unix:{socket_dir}/d",), metrics_listen="127.0.0.1:0")),
    }
    for service in found.values():
        service.start()
    yield found
    for service in found.values():
        if service.is_running:
            service.kill()


def scrape(service: Service) -> Series:
    service.wait_for("metrics on ")
    address = re.search(r"metrics on (http://\S+)", service.log)
    assert address is not None
    with urllib.request.urlopen(address[1], timeout=60) as response:
        return parse(response.read().decode())


def test_metrics_are_there_from_the_start_and_end_with_the_process(services: dict[str, Service]) -> None:
    series = scrape(services["coordinator"])
    assert value(series, "specwire_coordinator_ready") == 0
    assert value(series, "specwire_coordinator_requests_total") == 0
    services["drafter"].wait_ready()
    assert value(scrape(services["drafter"]), "specwire_drafter_ready") == 1
    assert {name: service.stop() for name, service in services.items()} == {"coordinator": 0, "drafter": 0}


def test_an_address_in_use_ends_the_service_with_a_message(socket_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service = Service(CoordinatorConfig(listen=(f"unix:{socket_dir}/c",), verifiers=(f"unix:{socket_dir}/v",), metrics_listen=address))
        service.start()
        assert service.wait_ended() == 1
    assert f"cannot serve metrics on {address}" in service.log
    assert "Traceback" not in service.log
