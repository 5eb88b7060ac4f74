"""The slice `lanes` of `two_gpus`: one lane against two with a GPU each, lanes of different loads, and a lane that is killed under load."""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.load import run_batch
from benchmarks.gpu.schedule import Schedule
from benchmarks.gpu.slices import Slice
from benchmarks.gpu.stack import Served
from benchmarks.gpu.two_gpus_measure import fill_caches, measure_batch
from benchmarks.gpu.two_gpus_services import Services
from benchmarks.gpu.window import Batch
from specwire.messages import CoordinatorStatus, GenerateRequest
from specwire.sampling_params import SamplingParams

MIN_X = 1.9
"""Two lanes with twice the load, of one lane's tokens a second."""
_MAX_LIGHT = 4
"""Of the requests that the second lane gets, at most so many go on; the others end soon."""
_NUM_SHORT_TOKENS = 8
_SAMPLE_PAUSE_S = 0.02
_KILL_AT = 0.25
"""Share of all tokens at which the lane is killed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a lane ran, and with which K."""

    num_running: int
    k: int

    @classmethod
    def of(cls, status: CoordinatorStatus) -> "tuple[Load, ...]":
        return tuple(cls(lane.num_running, lane.num_speculative_tokens) for lane in status.lanes)


async def measure_lanes(part: Slice, services: Services, schedule: Schedule, prompts: list[list[int]]) -> None:
    """The whole slice, for numbers of sequences of one lane of which there are prompts for two."""
    part.note(schedule=schedule)
    sizes = services.peers.sizes
    loads = [count for count in sizes.concurrency if 2 * count <= len(prompts)] or [len(prompts) // 2]
    for lane in range(2):  # both caches get all prompts, so that none is computed below, wherever it goes
        async with services.coordinate(_always(schedule), [f"v{lane}"], [f"d{lane}"]) as served:
            for first in range(0, len(prompts), sizes.max_num_seqs):
                await fill_caches(served, prompts[first : first + sizes.max_num_seqs])
    if left := [count for count in loads if not part.has(c=count)]:
        await compare(part, services, schedule, prompts, left)
    async with services.coordinate(schedule, ["v0", "v1"], ["d0", "d1"]) as served:
        found = describe(await differ(served, prompts, _light(schedule, len(prompts))), schedule)
        part.note(**found)
        part.note(**await lose_lane(services, served, prompts[: 2 * loads[-1]]))
    if not (found["lanes_had_different_k"] or found["schedule_has_one_k"]):
        raise SystemExit(f"lanes of different loads never had different K: {found['k_of_different_loads']} by the schedule {schedule}")


async def compare(part: Slice, services: Services, schedule: Schedule, prompts: list[list[int]], loads: Sequence[int]) -> None:
    """A row for each load. One lane runs before and after the two, so that time is no matter; its better run counts."""
    ones: dict[int, list[dict[str, Any]]] = {count: [] for count in loads}
    twos: dict[int, dict[str, Any]] = {}

    async def measure_one() -> None:
        async with services.coordinate(schedule, ["v0"], ["d0"]) as served:
            for count in loads:
                ones[count].append(await measure_batch(served, prompts[:count]))

    await measure_one()
    async with services.coordinate(schedule, ["v0", "v1"], ["d0", "d1"]) as served:
        for count in loads:
            twos[count] = await measure_batch(served, prompts[: 2 * count])
    await measure_one()
    for count in loads:
        one, two = max(ones[count], key=lambda found: float(found["tok_s"])), twos[count]
        ratio = two["tok_s"] / one["tok_s"]
        row = {"c": count, "k": k_of(schedule, count), "one_tok_s": one["tok_s"], "two_c": 2 * count, "two_tok_s": two["tok_s"]}
        part.add({**row, "x_one": ratio, "aim": f">= {MIN_X}", "is_met": ratio >= MIN_X, "one": ones[count], "two": two})


def _always(schedule: Schedule) -> Schedule:
    """One that drafts for any number of sequences: only who is asked for drafts computes prompts."""
    return ((1, schedule[-1][1], max(1, *(k for _, _, k in schedule))),)


def _light(schedule: Schedule, num_prompts: int) -> int:
    """Sequences that go on in the second lane: so few that the schedule gives them another K than it gives those of the first lane."""
    first_of_others = next((first for first, _, k in schedule if k != schedule[0][2]), _MAX_LIGHT + 1)
    return max(1, min(_MAX_LIGHT, first_of_others - 1, num_prompts // 2 - 1))


def k_of(schedule: Schedule, count: int) -> int:
    """The schedule's for so many sequences."""
    return next(k for first, last, k in schedule if first <= count <= last)


async def differ(served: Served, prompts: Sequence[list[int]], num_light: int) -> list[tuple[Load, ...]]:
    """Every second request goes to the second lane, where all but a few end soon: what lanes ran with which K, until all have ended or sequences were
    moved so that the loads are even again."""
    num_steps = served.peers.sizes.num_steps
    requests = [_request(prompt, num_steps if index % 2 == 0 or index < 2 * num_light else _NUM_SHORT_TOKENS) for index, prompt in enumerate(prompts)]
    num_short = sum(request.sampling.max_tokens == _NUM_SHORT_TOKENS for request in requests)
    samples: list[tuple[Load, ...]] = []
    async with Batch(served.channel, requests) as batch:
        while batch.num_done < len(requests):
            await batch.read()
            if num_short <= batch.num_done < len(requests):
                loads = Load.of(await batch.read_beside(served.status()))
                if all(load.num_running for load in loads):
                    samples.append(loads)
    assert samples, "both lanes never ran at once after the short requests had ended"
    return samples


def describe(samples: Sequence[tuple[Load, ...]], schedule: Schedule) -> dict[str, Any]:
    """What lanes of different loads ran, and the sample with the most different loads, with different K if there is one."""
    different = [loads for loads in samples if loads[0].k != loads[1].k]
    most = max(different or samples, key=lambda loads: abs(loads[0].num_running - loads[1].num_running))
    return {
        "loads": [[[load.num_running, load.k] for load in sample] for sample in samples],
        "lanes_had_different_k": bool(different),
        "schedule_has_one_k": len({k for _, _, k in schedule}) == 1,
        "k_of_different_loads": {f"lane {index}, {load.num_running} sequences": load.k for index, load in enumerate(most)},
    }


async def lose_lane(services: Services, served: Served, prompts: list[list[int]]) -> dict[str, Any]:
    """Kills the second verifier while both lanes are at work: all requests get all their tokens, later."""
    num_tokens = services.peers.sizes.num_steps + 1
    undisturbed = await run_batch(served.channel, prompts, num_tokens, is_seeded=True)
    at_start = await served.status()
    running = asyncio.create_task(run_batch(served.channel, prompts, num_tokens, is_seeded=True))
    status = at_start
    while status.num_generated_tokens - at_start.num_generated_tokens < _KILL_AT * num_tokens * len(prompts):
        assert not running.done(), "the batch has ended before a lane was killed"
        await asyncio.sleep(_SAMPLE_PAUSE_S)
        status = await served.status()
    [[verifier]] = services.supervisors["v1"].groups
    killed_s = time.perf_counter()
    verifier.send_signal(signal.SIGKILL)
    generated = await running  # which checks that every request has got all its tokens
    after = await served.status()
    assert not after.lanes[1].is_ready, "the killed lane takes rounds"
    return {
        "killed_lane_c": len(prompts),
        "killed_lane_ran": status.lanes[1].num_running,
        "killed_lane_s": generated.seconds,
        "killed_lane_s_from_kill": time.perf_counter() - killed_s,
        "undisturbed_s": undisturbed.seconds,
        "killed_lane_reason": after.lanes[1].reason,
    }


def _request(prompt: list[int], num_tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
