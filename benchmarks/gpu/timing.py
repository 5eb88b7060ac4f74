"""Times on a GPU: graph replays over several sets of inputs, beside the bandwidth of a large copy."""

import math
from collections.abc import Callable, Sequence

import torch
from triton.testing import do_bench


def graph_us(calls: Sequence[Callable[[], object]], rep_ms: int = 60) -> float:
    """Microseconds of one call: the median of replays of a graph of all of them, each on its own inputs, the L2 cache flushed between replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return do_bench(graph.replay, warmup=10, rep=rep_ms, return_mode="median") * 1e3 / len(calls)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 4 GiB."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median") * 1e-3)


def num_sets(num_bytes: float) -> int:
    """Sets of inputs of so many bytes that together they are far larger than the L2 cache."""
    return min(max(math.ceil(500e6 / num_bytes), 1), 64)


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; NaN shows."""
    difference = output.double() - reference.double()
    return float(difference.norm() / reference.double().norm())
