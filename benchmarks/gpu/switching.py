"""A coordinator process whose policy is switched while it runs, between two batches: `python -m benchmarks.gpu.switching SOCKET --flag value`.

Each line that comes on the socket is a JSON object, `{"schedule": [[start, end, K], ...], "is_adaptive": false}`, and is answered by another: what
adaptive verification believes, if it was on before. What it has learned stays until it is switched on again.
"""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.__main__ import serve
from coordinator.adaptive import LanePolicy
from coordinator.engine import Engine
from coordinator.lane import Lane
from specwire.arguments import parse_flags
from specwire.config import CoordinatorConfig
from specwire.policy.schedule import SteadySchedule, dense_schedule
from specwire.process import run_service

Schedule = Sequence[Sequence[int]]
_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)


@dataclass(slots=True)
class Switch:
    """The policies of an engine's lanes.

    Args:
        policies: of lanes, which have them only while adaptive verification is on.
    """

    engine: Engine
    policies: dict[Lane, LanePolicy] = field(default_factory=dict)
    server: asyncio.Server | None = None

    async def listen(self, path: str) -> None:
        """Takes switches on a Unix socket; one that a process before this one has left there is replaced."""
        self.server = await asyncio.start_unix_server(self._serve, path)

    def set(self, schedule: Schedule, *, is_adaptive: bool) -> None:
        """For all steps from now on; no lane may run a sequence."""
        description = self.engine.description
        assert description is not None, "a policy is switched before a verifier was reached"
        for lane in self.engine.lanes:
            assert not lane.running, f"a policy is switched while lane {lane.index} runs {len(lane.running)} sequences"
            if lane.policy is not None:
                self.policies[lane] = lane.policy
            lane.schedule = SteadySchedule(dense_schedule(schedule, lane.num_speculative_tokens, description.max_num_seqs))
            lane.policy = self.policies[lane] if is_adaptive else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            wanted = json.loads(line)
            known = (lane.policy or self.policies.get(lane) for lane in self.engine.lanes)
            believed = next((beliefs(policy) for policy in known if policy is not None), {})
            self.set(wanted["schedule"], is_adaptive=wanted["is_adaptive"])
            writer.write(json.dumps({"done": True} | believed).encode() + b"\n")
            await writer.drain()
        writer.close()


def beliefs(policy: LanePolicy) -> dict[str, Any]:
    """What a policy has asked for so far, by K, and the factors that it multiplies the verifier's table by, by tokens of a round."""
    correction = policy.cost.verify.correction
    return {
        "requested": list(policy.policy.counters.requested),
        "num_probes": policy.policy.counters.num_probes,
        "verify_factors": {size: round(correction.at(size), 3) for size in _SIZES},
        "hop_factor": round(policy.cost.hops.correction.factor, 3),
        "run_ahead_factors": {size: round(policy.cost.clock.run_ahead.at(size), 3) for size in _SIZES},
        "lockstep_factors": {size: round(policy.cost.clock.lockstep.at(size), 3) for size in _SIZES},
        "draft_factors": [round(curve.correction.factor, 3) for curve in policy.cost.drafts],
    }


async def switch_policy(path: str, schedule: Schedule, *, is_adaptive: bool) -> dict[str, Any]:
    """Switches the policy of the coordinator that listens there. Returns what `beliefs` says; empty before adaptive verification was on.

    Args:
        schedule: K by batch size; with adaptive verification its ceiling.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(json.dumps({"schedule": [list(entry) for entry in schedule], "is_adaptive": is_adaptive}).encode() + b"\n")
    answer = await reader.readline()
    writer.close()
    assert answer, "the coordinator does not answer to a switch of its policy; its log says why"
    believed: dict[str, Any] = json.loads(answer)
    assert believed.pop("done"), believed
    return believed


def main() -> None:
    """Entry point."""
    path, *flags = sys.argv[1:]
    config = parse_flags(CoordinatorConfig, "python -m benchmarks.gpu.switching", flags)
    run_service("coordinator", lambda: serve(config, lambda engine: Switch(engine).listen(path)))


if __name__ == "__main__":
    main()
