"""What the device does in passes, by kinds of kernels: from a profile of graphs that are replayed."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_KINDS = (
    ("attention", re.compile(r"attend|merge")),
    ("norms", re.compile(r"rms_norm")),
    ("rotary + KV write", re.compile(r"rotary")),
    ("SiLU-mul", re.compile(r"silu")),
    ("products", re.compile(r"row_linear|row_stream|skinny|nvjet|gemm|gemv|cutlass|splitk|xmma|cublas", re.IGNORECASE)),
    ("sampling", re.compile(r"sample|argmax|find_cuts|target_chunks|advance|accept|report")),
    ("upload", re.compile(r"HtoD", re.IGNORECASE)),
    ("download", re.compile(r"DtoH", re.IGNORECASE)),
)
_OTHERS, _HEAD, _BETWEEN, _HOST = "inputs, work list, copies", "head", "between kernels", "between calls"
_MAX_SHOWN_KERNELS = 14


class Kernel(NamedTuple):
    """One run of a kernel or a copy, us."""

    name: str
    start_us: float
    end_us: float


@dataclass(slots=True)
class Share:
    """Of a kind.

    Args:
        us: of the device's time that it had alone: from its start, or from the end of the kernel before it if that is later, as kernels of a chain
            start early.
        num_runs: kernels.
    """

    us: float = 0.0
    num_runs: int = 0

    def add(self, us: float) -> None:
        self.us += us
        self.num_runs += 1


def split_time(kernels: Sequence[Kernel]) -> dict[str, Share]:
    """The time from the first start to the last end, by kind. Nothing counts twice: the shares' sum is that time."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    kinds = [kind_of(kernel.name) for kernel in ordered]
    for index in range(len(kinds) - 2, -1, -1):  # a product may add its parts up in a kernel of its own
        if kinds[index] == "products" and kinds[index + 1] in ("sampling", _HEAD):
            kinds[index] = _HEAD
    shares: dict[str, Share] = {}
    until_us = ordered[0].start_us
    for kernel, kind in zip(ordered, kinds, strict=True):
        gap_us = kernel.start_us - until_us
        if gap_us > 0:
            shares.setdefault(_HOST if kind == "upload" else _BETWEEN, Share()).add(gap_us)
        own_us = kernel.end_us - max(kernel.start_us, until_us)
        shares.setdefault(kind, Share()).add(max(own_us, 0.0))
        until_us = max(until_us, kernel.end_us)
    return shares


def kind_of(name: str) -> str:
    """The kind of kernel, by its name; of a head's product only what follows says that it is one."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), _OTHERS)


def profile(run: Callable[[], object], columns: dict[str, Any], num_units: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of a run on a CUDA device, in microseconds of a unit: a step, a pass, or whatever the run has so many of."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or [] if str(event.device_type).endswith("CUDA")]
    kernels = [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events]
    by_name: dict[str, Share] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name[:70], Share()).add(kernel.end_us - kernel.start_us)
    longest = sorted(by_name.items(), key=lambda item: -item[1].us)[:_MAX_SHOWN_KERNELS]
    for kind, share in sorted(split_time(kernels).items(), key=lambda item: -item[1].us):
        yield {**columns, "kind": kind, "us": share.us / num_units, "runs": share.num_runs / num_units}
    shown = [{"kernel": name, "us": share.us / num_units, "runs": share.num_runs / num_units} for name, share in longest]
    yield {**columns, "kind": "all", "us": sum(share.us for share in split_time(kernels).values()) / num_units, "kernels": shown}
