"""How much of a device's memory the KV cache may take, measured and reckoned, and a table of where the memory went."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specwire.engine.heads.source import FeatureSource
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.out_of_memory import format_bytes
from specwire.errors import ResourceExhaustedError

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30
"""For the KV cache on a CPU, where nobody says otherwise."""
_CONTEXT_BYTES = 640 << 20
"""What a process has on a device outside of torch's counters: the CUDA context, loaded kernels, library handles. Assumed, on the safe side."""
_GRAPH_BYTES = 8 << 20
"""What the driver keeps of a captured graph of some hundred kernels. Assumed; the table shows what is free in the end."""
_SLACK = 0.01
"""Share of the process's memory that fragments may take."""


class WarmedUp(Protocol):
    """A runner whose tensors all have their final sizes."""

    @property
    def num_graphs(self) -> int: ...

    def warm_up(self) -> None:
        """Takes as much memory for a moment as any work that may follow."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a process takes on a device beside its KV cache.

    Args:
        weights: of the model.
        buffers: tensors that live as long as the runner: inputs, logits, slot state.
        activations: what the largest round takes on top while it runs.
        graphs: of all captured graphs: their common pool, and what the driver keeps of each.
    """

    weights: int
    buffers: int
    activations: int
    graphs: int

    @property
    def later(self) -> int:
        """What is taken after the weights."""
        return self.buffers + self.activations + self.graphs


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device.

    Args:
        total: of the device.
        free: now that the weights are loaded, and nothing else of this process is there.
    """

    total: int
    free: int


def kv_cache_bytes(needs: MemoryNeeds, device: DeviceMemory, utilization: float) -> int:
    """Bytes for the KV cache: this process's share of the device less what else it needs, and no more than others have left.

    Negative where the share is too small. The context is a part of the share; of the free memory it is gone already.
    """
    share = int(device.total * utilization)
    slack = int(share * _SLACK)
    return min(share - _CONTEXT_BYTES - needs.weights, device.free) - needs.later - slack


def decide_kv_cache_bytes(needs: MemoryNeeds, device: DeviceMemory, utilization: float, bytes_per_block: int) -> int:
    """As `kv_cache_bytes`, and the log says so where others have taken a part of this process's share.

    Raises:
        ResourceExhaustedError: that is less than one block; with the numbers.
    """
    num_bytes = kv_cache_bytes(needs, device, utilization)
    share = int(device.total * utilization)
    alone = kv_cache_bytes(needs, DeviceMemory(device.total, device.total), utilization)
    # A context that is larger than assumed is within the slack, and no other process's.
    is_alone = alone - num_bytes <= share * _SLACK
    others = "" if is_alone else f", and of the device only {format_bytes(device.free)} are free: other processes hold more than their part"
    if num_bytes < bytes_per_block:
        parts = {
            "weights": needs.weights,
            "buffers": needs.buffers,
            "the largest round": needs.activations,
            "graphs": needs.graphs,
            "context and fragments": share - alone - needs.weights - needs.later,
        }
        raise ResourceExhaustedError(
            f"gpu_memory_utilization {utilization:g} is {format_bytes(share)} of {format_bytes(device.total)}, and without the KV cache this process "
            f"needs {format_bytes(share - alone)} ({', '.join(f'{name} {format_bytes(part)}' for name, part in parts.items())}){others}; "
            "raise gpu_memory_utilization, lower max_num_seqs, max_num_batched_tokens or num_speculative_tokens, or set kv_cache_memory"
        )
    if others:
        logger.warning("the KV cache gets %s instead of %s%s", format_bytes(num_bytes), format_bytes(alone), others)
    return num_bytes


def allocated_bytes(device: torch.device) -> int:
    """What the tensors of this process take on a CUDA device; 0 elsewhere, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def read_device_memory(device: torch.device) -> DeviceMemory:
    """Of a CUDA device, after what this process has freed is given back."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free)


def measure_needs(model: Decoder, make_runner: Callable[[KVCache], WarmedUp], features: Sequence[FeatureSource] = ()) -> MemoryNeeds:
    """Builds a runner over a KV cache of one block, runs its largest work once, and lets it go.

    Args:
        model: on a CUDA device, and alone there in this process.
        make_runner: as it will be made for good.
        features: what heads read, whose making takes memory, too.
    """
    device = model.device
    weights = allocated_bytes(device)
    runner = make_runner(KVCache(model.config, 1, model.dtype, device, features=features))
    buffers = allocated_bytes(device) - weights
    torch.cuda.reset_peak_memory_stats(device)
    runner.warm_up()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - weights - buffers
    num_graphs = runner.num_graphs
    # Graphs keep memory of their own, as much as the largest of them needs: not more than the largest round.
    return MemoryNeeds(weights, buffers, activations, num_graphs * _GRAPH_BYTES + (activations if num_graphs else 0))


def log_memory(parts: Mapping[str, int], device: torch.device, kv_cache: KVCache) -> None:
    """Logs a table of a CUDA device's memory, a line each: parts of this process by name, its KV cache, the rest of what it holds, what is free."""
    blocks = f"KV cache: {kv_cache.num_blocks} blocks of {kv_cache.block_size} tokens, and a scratch block"
    parts = {**parts, blocks: sum(layer.nbytes for layer in kv_cache.layers)}
    if kv_cache.features is not None:
        parts["features of draft heads, by block, too"] = kv_cache.features.num_bytes
    free, total = torch.cuda.mem_get_info(device)
    rest = torch.cuda.memory_reserved(device) - sum(parts.values())
    rows = {**parts, "graphs, scratch, and what the allocator keeps": rest, f"free of {format_bytes(total)}": free}
    for name, num_bytes in rows.items():
        logger.info("memory on %s: %10s  %s", device, format_bytes(num_bytes), name)
