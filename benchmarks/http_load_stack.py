"""The processes of benchmarks.http_load: scripted peers, a coordinator, front ends; and what they use."""

import contextlib
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_load_clients import MAX_TOKENS, PROMPT_LEN
from benchmarks.overhead_services import ACCEPTANCE, K
from benchmarks.soak import rss_mib
from specwire.bench.http_client import HttpClient
from specwire.config import CoordinatorConfig, HttpConfig, flags
from specwire.launch import ServiceProcess, ServiceSpec, Supervisor
from specwire.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = -(-(PROMPT_LEN + MAX_TOKENS) // _BLOCK_SIZE) * _BLOCK_SIZE
# A step sends one round at most.
_STEPS = re.compile(r"^specwire_coordinator_rounds_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """What has been used at some moment: CPU time since a process's start, seconds; resident memory, MiB; of the front ends together.

    process_mib: memory by process; the HTTP service's own one, without requests, is `http`, those that it started are `http 1` and following."""

    time_s: float
    num_steps: int
    cpu_s: dict[str, float]
    rss_mib: dict[str, float]
    process_mib: dict[str, float]


class HttpStack:
    """Running processes. url: where clients call, empty without front ends; address: the coordinator's own."""

    def __init__(self, supervisor: Supervisor, url: str, address: str, metrics_url: str) -> None:
        self._services = [service for group in supervisor.groups for service in group]
        self._metrics = HttpClient(metrics_url)
        self.url = url
        self.address = address

    async def usage(self) -> Usage:
        """Steps count from the coordinator's start; those of memory and time without a process that has just ended."""
        pids = {service.spec.name: _pids(service) for service in self._services}
        cpu_s = {name: sum(map(_cpu_s, of_service)) for name, of_service in pids.items()}
        processes = {f"{name} {index}" if index else name: rss_mib(pid) for name, of_service in pids.items() for index, pid in enumerate(of_service)}
        memory = {name: sum(processes[f"{name} {index}" if index else name] for index in range(len(of_service))) for name, of_service in pids.items()}
        async with self._metrics.request("GET", "/metrics") as answer:
            text = (await answer.read()).decode()
        return Usage(time.monotonic(), round(sum(map(float, _STEPS.findall(text)))), cpu_s, memory, processes)


@contextlib.asynccontextmanager
async def http_stack(folder: Path, num_clients: int, num_front_ends: int, round_ms: float) -> AsyncIterator[HttpStack]:
    """K and acceptance are those of benchmarks.overhead, so that steps are like the ones there.

    Args:
        folder: for sockets.
        round_ms: what a round of the verifier takes besides its own work.
    """
    http_port, metrics_port = _free_ports(2)
    addresses = {name: f"unix:{folder}/{name}" for name in ("verifier", "drafter", "coordinator", "http")}
    shared = {"max_num_seqs": num_clients, "max_model_len": _MAX_MODEL_LEN, "max_num_draft_tokens": K}
    verifier = shared | {
        "max_num_batched_tokens": max(512, 2 * num_clients * (K + 1)), "block_size": _BLOCK_SIZE, "delay_s": round_ms / 1000,
        "num_blocks": num_clients * _MAX_MODEL_LEN // _BLOCK_SIZE, "prefix_caching": False,
    }  # fmt: skip
    coordinator = CoordinatorConfig(
        listen=(addresses["coordinator"],), verifiers=(addresses["verifier"],), drafters=(addresses["drafter"],), min_draft_wait_ms=10_000.0,
        max_queue=num_clients, metrics_listen=f"127.0.0.1:{metrics_port}", speculative_config=SpeculativeConfig(num_speculative_tokens=K),
    )  # fmt: skip
    http = HttpConfig(
        listen=(f"127.0.0.1:{http_port}",), coordinator=addresses["coordinator"], processes=max(1, num_front_ends), health_listen=addresses["http"]
    )  # fmt: skip
    groups = [
        [_scripted("verifier", addresses, verifier), _scripted("drafter", addresses, shared | {"acceptance": ACCEPTANCE})],
        [ServiceSpec("coordinator", "coordinator", ("--config=", *flags(coordinator)), addresses["coordinator"], essential=True)],
        *([[ServiceSpec("http", "specwire.http", ("--config=", *flags(http)), addresses["http"], essential=True)]] if num_front_ends else []),
    ]
    url = f"http://{http.listen[0]}" if num_front_ends else ""
    supervisor = Supervisor(groups, _log_line, startup_timeout_s=120.0)
    try:
        await supervisor.start()
        yield HttpStack(supervisor, url, addresses["coordinator"], f"http://127.0.0.1:{metrics_port}")
    finally:
        await supervisor.stop()


def _scripted(name: str, addresses: dict[str, str], changes: dict[str, object]) -> ServiceSpec:
    return ServiceSpec(name, "tests.scripted", (name, addresses[name], *(f"{field}={value}" for field, value in changes.items())), addresses[name])


def _pids(service: ServiceProcess) -> list[int]:
    """Of a service and of the processes that it has started."""
    assert service.pid is not None, f"{service.spec.name} has ended"
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    return [service.pid, *map(int, children)]


def _cpu_s(pid: int) -> float:
    """User and system time of all its threads (clock_getcpuclockid(3) of another process, as Linux numbers such clocks)."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def _free_ports(number: int) -> list[int]:
    """Ports on 127.0.0.1 that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _log_line(name: str, line: str) -> None:
    if " INFO " not in line:
        logger.warning("%s: %s", name, line)
