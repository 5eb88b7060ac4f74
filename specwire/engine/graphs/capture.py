"""Captures what runs over tensors of fixed size as CUDA graphs."""

from collections.abc import Callable, Sequence

import torch

from specwire.engine.kernels.options import MIN_PRODUCT_ROWS

_MAX_PRODUCT_ROWS = 128


def capture_graphs(runs: Sequence[Callable[[], None]], on_progress: Callable[[int, int], None]) -> list[torch.cuda.CUDAGraph]:
    """A graph of each run, in their order, in one memory pool: they may only be replayed one after the other, in one stream.

    Args:
        runs: with the largest first, the memory of a smaller one fits into that of a larger one.
        on_progress: called with (graphs captured, graphs in all) after each one.
    """
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for run in runs:
        run()  # compiles its kernels, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        graphs.append(graph)
        on_progress(len(graphs), len(runs))
    return graphs


def eager_sizes(most: int) -> list[int]:
    """Numbers of tokens up to `most` to run once without a graph, so that nothing is left to compile: each that `padded_rows` tells apart may have
    kernels of its own."""
    rows, sizes = MIN_PRODUCT_ROWS, {most}
    while rows <= _MAX_PRODUCT_ROWS:
        sizes.add(min(rows, most))
        rows *= 2
    return sorted(sizes)
