"""The compose stack for real, under load: every container killed once, scaled to 3 verifiers and 4 drafters and back, stopped.

python -m benchmarks.compose_drill [--no-build] [--streams 12]

Needs a Docker engine with the compose plugin. What it asks for is checked at the end: status 1 where something is not as it should be.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from benchmarks.compose_load import Load
from benchmarks.compose_stack import LOOK_S, SERVICES, ComposeStack
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.client import AsyncClient
from specwire.errors import UnavailableError
from specwire.messages import CoordinatorStatus

logger = logging.getLogger(__name__)

NUM_VERIFIERS, NUM_DRAFTERS = 3, 4
FAIR_SHARE = 0.6
"""Of an equal part of what runs: what a new replica must take."""
JOIN_S, STOP_S = 30.0, 20.0
_BACK_S = 300.0
# float32 and one thread: a token has the same bits whatever is computed with it.
_CONFIG = """
speculative_config: {num_speculative_tokens: 3}
verifier: {dtype: float32, num_threads: 1, kv_cache_memory: 134217728, max_model_len: 512}
coordinator: {verifier_wait_s: 300}
"""
_PROBE = (
    "id -u; touch /opt/specwire/x 2>/dev/null && echo writable; touch /tmp/x /var/cache/specwire/x && echo scratch; grep CapEff /proc/self/status"
)


class Drill:
    """Steps in the order of a run; each one adds its figures to `figures`, and what is not as it should be to `failures`."""

    def __init__(self, stack: ComposeStack, client: AsyncClient, load: Load) -> None:
        self._stack = stack
        self._client = client
        self._load = load
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []

    async def start(self, build: bool) -> None:
        """`up --build --wait`, then what the containers may do."""
        async with self._timed("start"):
            await self._stack.scale(1, 1, *(("--build",) if build else ()))
        self.figures["image_mb"] = await self._stack.image_sizes_mb()
        for service in SERVICES:
            said = (await self._stack.execute((await self._stack.containers(service))[0], "sh", "-c", _PROBE)).split()
            self._expect(said == ["10001", "scratch", "CapEff:", "0" * 16], f"{service} has other rights than it should: {said}")
        self.figures["expected_tokens"] = await self._load.learn()

    async def kill_each(self, what: str) -> None:
        """SIGKILL to the process of each container, one after the other, and until the restart policy has it back."""
        kills: list[dict[str, Any]] = []
        for service in SERVICES:
            for container in await self._stack.containers(service):
                # As many as there are, and all streams under way.
                wanted = _members(await self._until(self._is_busy))
                self._load.next_phase()
                restarts = await self._stack.num_restarts(container)
                started_s = time.monotonic()
                await self._stack.kill_process(container)
                await self._stack.wait_restarted(container, restarts)
                await self._until(lambda status, wanted=wanted: _members(status) == wanted and self._is_busy(status))
                seconds = time.monotonic() - started_s
                await asyncio.wait_for(self._load.hear_all(), _BACK_S)
                phase = self._load.next_phase()
                kills.append({"container": container, "back_s": round(seconds, 1), **phase.figures()})
                self._expect(phase.different == 0 and not phase.errors, f"after {container} was killed: {phase.figures()}")
                self._expect(not phase.unavailable or service == "coordinator", f"{container} killed: {phase.unavailable}")
        self.figures[what] = kills

    async def scale_out(self) -> None:
        """More of both, and how long each new one takes to get its share of what runs."""
        self._load.next_phase()
        joins = asyncio.create_task(self._watch_joins())
        async with self._timed("scale_out"):
            await self._stack.scale(NUM_VERIFIERS, NUM_DRAFTERS)
        self.figures["join_s"] = await joins
        late = {name: seconds for name, seconds in self.figures["join_s"].items() if seconds > JOIN_S}
        self._expect(len(self.figures["join_s"]) == NUM_VERIFIERS + NUM_DRAFTERS and not late, f"replicas without their share in time: {late}")
        self.figures["while_scaled_out"] = self._check_phase("scale out")

    async def scale_in(self) -> None:
        """Back to one of each: SIGTERM to the others, which hand over what they have."""
        self._load.next_phase()
        async with self._timed("scale_in"):
            await self._stack.scale(1, 1)
            await self._until(lambda status: _members(status) == (1, 1))
        await asyncio.sleep(5.0)  # what runs on the last one
        self.figures["while_scaled_in"] = self._check_phase("scale in")

    async def stop(self) -> None:
        """SIGTERM to all, without requests."""
        async with self._timed("stop"):
            await self._stack.compose("stop")
        self.figures["exit_statuses"] = statuses = await self._stack.exit_statuses()
        self._expect(len(statuses) == len(SERVICES) and not any(statuses.values()), f"after SIGTERM: {statuses}")
        self._expect(self.figures["stop_s"] < STOP_S, f"stopped only after {self.figures['stop_s']} s")

    async def _watch_joins(self) -> dict[str, float]:
        """Seconds from when a peer is ready until it has its share, for those that get there."""
        ready_s: dict[str, float] = {}
        joined: dict[str, float] = {}

        def all_joined(status: CoordinatorStatus) -> bool:
            now_s = time.monotonic()
            lanes = {lane.address: lane.num_running for lane in status.lanes if lane.is_ready}
            drafters = {drafter.address: drafter.num_open for drafter in status.drafters if drafter.is_connected}
            for peers, number in ((lanes, NUM_VERIFIERS), (drafters, NUM_DRAFTERS)):
                for address, count in peers.items():
                    ready_s.setdefault(address, now_s)
                    if count >= FAIR_SHARE * sum(peers.values()) / number:
                        joined.setdefault(address, round(now_s - ready_s[address], 1))
            return len(joined) == NUM_VERIFIERS + NUM_DRAFTERS

        with contextlib.suppress(TimeoutError):
            await self._until(all_joined)
        return joined

    async def _until(self, holds: Callable[[CoordinatorStatus], bool]) -> CoordinatorStatus:
        """Looks at the status until it is so."""
        async with asyncio.timeout(_BACK_S):
            while True:
                with contextlib.suppress(UnavailableError):
                    status = await self._client.get_status()
                    if holds(status):
                        return status
                await asyncio.sleep(LOOK_S)

    def _is_busy(self, status: CoordinatorStatus) -> bool:
        return status.is_ready and sum(lane.num_running for lane in status.lanes) == self._load.num_streams

    def _check_phase(self, what: str) -> dict[str, Any]:
        phase = self._load.next_phase()
        self._expect(phase.different == 0 and not phase.unavailable and not phase.errors, f"{what}: {phase.figures()}")
        return phase.figures()

    def _expect(self, holds: bool, failure: str) -> None:
        if not holds:
            logger.error("%s", failure)
            self.failures.append(failure)

    @contextlib.asynccontextmanager
    async def _timed(self, what: str) -> AsyncIterator[None]:
        started_s = time.monotonic()
        yield
        self.figures[f"{what}_s"] = round(time.monotonic() - started_s, 1)
        logger.info("%s took %.1f s", what, self.figures[f"{what}_s"])


def _members(status: CoordinatorStatus) -> tuple[int, int]:
    """(verifiers that are ready, drafters that are connected)."""
    return sum(lane.is_ready for lane in status.lanes), sum(drafter.is_connected for drafter in status.drafters)


async def run(args: argparse.Namespace, config: Path) -> Drill:
    """All steps; the stack and its volumes are gone afterwards."""
    environment = {"SPECWIRE_CONFIG": str(config), "SPECWIRE_PORT": str(args.port), "SPECWIRE_HTTP_PORT": str(args.http_port)}
    stack = ComposeStack("specwire-drill", environment)
    try:
        async with AsyncClient(f"127.0.0.1:{args.port}") as client:
            load = Load(client, args.streams, args.max_tokens)
            try:
                return await _run_steps(Drill(stack, client, load), load, args.build)
            finally:
                await load.cancel()
    except Exception:
        logger.error("the services' last words:\n%s", await stack.compose("logs", "--tail", "40"))
        raise
    finally:
        await stack.compose("down", "--volumes", "--timeout", "5")


async def _run_steps(drill: Drill, load: Load, build: bool) -> Drill:
    await drill.start(build)
    load.start()
    await drill.kill_each("killed_alone")
    await drill.scale_out()
    await drill.kill_each("killed_scaled_out")
    await drill.scale_in()
    await load.stop()
    await drill.stop()
    return drill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", dest="build", action="store_false", help="take the images that are there")
    parser.add_argument("--streams", type=int, default=12, help="requests at any time")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--port", type=int, default=50150, help="on 127.0.0.1, for the coordinator")
    parser.add_argument("--http-port", type=int, default=8150, help="on 127.0.0.1, for the HTTP API")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for compose_drill.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    bystanders = Bystanders()
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        config = Path(folder) / "specwire.yaml"
        config.write_text(_CONFIG)
        # The services read it as another user.
        Path(folder).chmod(0o755)
        drill = asyncio.run(run(args, config))
    kills = drill.figures["killed_alone"] + drill.figures["killed_scaled_out"]
    columns = ["container", "back_s", "answers", "different", "unavailable", "longest_gap_s"]
    print_table(columns, [[str(len(kill[c]) if isinstance(kill[c], list) else kill[c]) for c in columns] for kill in kills])
    print(f"\njoined after: {drill.figures['join_s']}")
    print(f"written to {write_report('compose_drill', {**drill.figures, 'failures': drill.failures}, args.output, bystanders)}")
    sys.exit(1 if drill.failures else 0)


if __name__ == "__main__":
    main()
