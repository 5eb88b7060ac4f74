"""The benchmark of many HTTP clients, in small: what it counts is what there was, and a wrong answer is found."""

from pathlib import Path

import pytest

from benchmarks import http_load
from benchmarks.http_load_clients import Clients
from tests.http.serving import http_served
from tests.waiting import until


@pytest.mark.slow
@pytest.mark.parametrize("num_front_ends", [0, 2])
async def test_a_short_run(num_front_ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_load, "_WARM_UP_S", 0.5)
    result = await http_load.measure(8, num_front_ends, 4.0, 0.0, 0.1)
    assert result["problems"] == []
    assert result["answers"] > 0
    assert result["steps"] > 0
    assert 0 < result["rows_per_step"] <= 2 * 8
    assert result["coordinator_cpu_ms"] > 0
    assert set(result["rss_mib"]) == ({"coordinator", "http"} if num_front_ends else {"coordinator"})


async def test_a_wrong_answer_is_found(socket_dir: Path) -> None:
    """A target that says other letters."""
    async with http_served(socket_dir, verifier={"alphabet": tuple(b"xyz")}) as served:
        clients = Clients(served.url, f"unix:{socket_dir}/coordinator.sock", 2)
        clients.start()
        await until(lambda: clients.tally.answers >= 2)
        await clients.stop()
    assert clients.tally.answers == clients.tally.num_problems
    assert set(clients.tally.problems) == {"an answer has another text than the target alone gives"}
