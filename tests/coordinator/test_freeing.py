"""Nothing of a request outlives it, without the garbage collector: what its parts know of each other ends with it."""

import gc
from pathlib import Path

import pytest

from coordinator.draft_slot import DraftSlot
from coordinator.sequence import Request, Sequence
from coordinator.slots import Slot
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript


def parts() -> dict[int, object]:
    """All parts of requests that are in memory. By their types: to be asked for their class makes some of torch's objects warn."""
    return {id(thing): thing for thing in gc.get_objects() if type(thing) in (Request, Sequence, Slot, DraftSlot)}


async def run(cluster: Cluster, end: str) -> None:
    """Runs requests that end in this way, and leaves nothing of them behind in the test itself."""
    if end == "stop":
        for seed in range(3):
            await cluster.submit([1, 2, seed], n=3, max_tokens=12, seed=seed, timeout_ms=60_000).check()
        return
    running = cluster.submit([1, 2, 3], n=2, max_tokens=400, seed=1, timeout_ms=30 if end == "deadline" else None)
    if end == "cancelled":
        await cluster.until(lambda: all(choice.token_ids for choice in running.sink.choices))
        running.handle.cancel()
    await running.sink.wait()
    assert (running.sink.error is not None) == (end == "deadline"), "it has ended in another way"
    await cluster.submit([4], max_tokens=1, seed=1).check()  # a step that had them in its plan is over with the next one


@pytest.mark.parametrize("trace_sample_ratio", [0.0, 1.0])
@pytest.mark.parametrize("end", ["stop", "cancelled", "deadline"])
async def test_requests_that_have_ended_are_freed(end: str, trace_sample_ratio: float, tmp_path: Path) -> None:
    scripts, spans = [VerifierScript(delay_s=0.002)], str(tmp_path / "spans.jsonl")
    async with Cluster(scripts, [DrafterScript()], trace_file=spans, trace_sample_ratio=trace_sample_ratio) as cluster:
        await cluster.all_there()
        gc.collect()
        before = parts()
        gc.disable()
        try:
            await run(cluster, end)
            await cluster.settle()
            left = [thing for key, thing in parts().items() if key not in before]
        finally:
            gc.enable()
    assert not left, f"{len(left)} parts of requests that have ended: {left}"


async def test_what_ends_behind_one_that_waits_is_freed() -> None:
    """While more important requests wait for long, it never comes to the head of the queue."""
    async with Cluster([VerifierScript(max_num_seqs=1)]) as cluster:
        await cluster.ready()
        running = cluster.submit([5], seed=1, max_tokens=400, priority=1)
        waiting = cluster.submit([6], seed=2, max_tokens=5, priority=1)
        for _ in range(5):
            for seed in range(100):
                cluster.submit([7], seed=seed, max_tokens=5, priority=2).handle.cancel()
            assert cluster.engine.num_waiting <= 2
            assert sum(type(part) is Sequence for part in parts().values()) < 100
        await running.check()
        await waiting.check()
