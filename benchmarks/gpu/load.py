"""A front end that does nothing but count: all requests in one message on one Session stream, timed from that to the last token of the last one."""

import random
import time
from dataclasses import dataclass
from typing import Any

from specwire.bench.metrics import add_stats
from specwire.messages import GenerateRequest, SessionStart, SpecStats
from specwire.sampling_params import SamplingParams
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import generate

_SESSION = "/specwire.v1.CoordinatorService/Session"


@dataclass(frozen=True, slots=True)
class Generated:
    """What one batch took.

    Args:
        arrivals: of the first request: (Unix ns, its tokens until then), once for each message with some.
        spec: sums over the requests.
    """

    seconds: float
    arrivals: list[tuple[int, int]]
    spec: SpecStats


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """New ones at every call."""
    return [[random.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


async def run_batch(channel: Any, prompts: list[list[int]], num_tokens: int, *, traceparent: str = "", is_seeded: bool = False) -> Generated:
    """Generates greedily, `num_tokens` of each whatever they are.

    Args:
        channel: to a coordinator.
        traceparent: of the first request.
        is_seeded: each request has its own seed in every batch, so that drafts that are accepted by chance fare alike in all of them.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    contexts = [traceparent] + [""] * (len(prompts) - 1)
    starts = [
        generate.pack_start(SessionStart(index, GenerateRequest(prompt, params.replace(seed=index) if is_seeded else params, traceparent=context)))
        for index, (prompt, context) in enumerate(zip(prompts, contexts, strict=True), start=1)
    ]
    call = channel.stream_stream(_SESSION, request_serializer=pb.SessionRequest.SerializeToString)()
    counts, num_done = [0] * (len(prompts) + 1), 0
    arrivals: list[tuple[int, int]] = []
    stats: list[SpecStats] = []
    started = time.perf_counter()
    await call.write(generate.pack_command(starts, ()))
    while num_done < len(prompts):
        data = await call.read()
        now_ns = time.time_ns()
        update = generate.unpack_update(pb.SessionResponse.FromString(data))
        before = counts[1]
        for delta in update.deltas:
            counts[delta.stream_id] += len(delta.token_ids)
        for event in update.events:
            assert event.error is None, f"request {event.stream_id} failed: {event.error}"
            if event.choice is not None:
                counts[event.stream_id] += len(event.choice.token_ids)
                stats += [event.choice.spec_stats] if event.choice.spec_stats is not None else []
            num_done += event.done
        if counts[1] > before:
            arrivals.append((now_ns, counts[1]))
    seconds = time.perf_counter() - started
    call.cancel()
    assert counts[1:] == [num_tokens] * len(prompts), f"requests got {sorted(set(counts[1:]))} tokens instead of {num_tokens}"
    return Generated(seconds, arrivals, add_stats(stats))
