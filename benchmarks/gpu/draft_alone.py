"""The draft model without services: calls of a draft runner as a drafter makes them, beside the time of reading its weights and KV."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.sizes import BLOCK_SIZE, Sizes
from benchmarks.gpu.timing import copy_bandwidth
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import dummy_model

_NUM_CALLS = 20
_WARM_CALLS = 3
_NUM_COMMITTED = 4
"""Tokens that a sequence gets between two calls; the KV of all but the last is that of drafts."""


def measure_alone(config: ModelConfig, sizes: Sizes, device: str) -> Iterator[dict[str, Any]]:
    """Every number of sequences with K = 1 and the largest K. A step is what one more draft of each sequence takes."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    model = dummy_model(config, dtype, device)
    num_seqs, max_len = sizes.max_num_seqs, sizes.num_prompt_tokens + _NUM_COMMITTED * (_NUM_CALLS + _WARM_CALLS + 1) + sizes.num_draft_tokens
    blocks = -(-max_len // BLOCK_SIZE)
    runner = DraftRunner(
        model,
        KVCache(config, num_seqs * blocks, dtype, device),
        max_num_seqs=num_seqs,
        max_num_drafts=sizes.num_draft_tokens,
        max_model_len=blocks * BLOCK_SIZE,
        max_chunk=num_seqs,
    )
    started = time.perf_counter()
    runner.capture()
    capture_s = time.perf_counter() - started
    tables: list[list[int]] = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).tolist()
    bandwidth = copy_bandwidth() if device != "cpu" else None
    weights_bytes = _weights_bytes(config, dtype.itemsize)
    for count in sizes.concurrency:
        call_ms = {}
        launch_ms = 0.0
        for k in sorted({1, sizes.num_draft_tokens}):
            call_ms[k], launch_ms = _time_calls(runner, tables[:count], sizes.num_prompt_tokens, k)
        most = sizes.num_draft_tokens
        context = sizes.num_prompt_tokens + _NUM_COMMITTED * (_WARM_CALLS + _NUM_CALLS // 2)
        kv_bytes = count * context * config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        floor_ms = None if bandwidth is None else most * (weights_bytes + kv_bytes) / bandwidth * 1e3
        yield {
            "c": count,
            "k": most,
            "call_ms": call_ms[most],
            "step_ms": (call_ms[most] - call_ms[1]) / max(1, most - 1),
            "first_ms": call_ms[1],
            "launch_ms": launch_ms,
            "floor_ms": floor_ms,
            "x_floor": None if floor_ms is None else call_ms[most] / floor_ms,
            "weights_bytes": weights_bytes,
            "kv_bytes": kv_bytes,
            "copy_bytes_per_s": bandwidth,
            "num_graphs": runner.num_graphs,
            "capture_s": capture_s,
        }


def _time_calls(runner: DraftRunner, tables: list[list[int]], num_prompt_tokens: int, k: int) -> tuple[float, float]:
    """Median milliseconds of a call from the host's rows to its drafts, and of its launch: the host's part."""
    for slot in range(len(tables)):
        runner.open(slot, DraftSampling(0.0, slot, 0))
    call_ms, launch_ms = [], []
    for call in range(_WARM_CALLS + _NUM_CALLS):
        position = num_prompt_tokens + _NUM_COMMITTED * call
        num_blocks = -(-(position + k) // BLOCK_SIZE)
        rows = [DraftRow(slot, position, [3 + slot % 97], table[:num_blocks], k) for slot, table in enumerate(tables)]
        started = time.perf_counter()
        results = runner.launch(rows)
        launched = time.perf_counter()
        drafts = results()
        call_ms.append((time.perf_counter() - started) * 1e3)
        launch_ms.append((launched - started) * 1e3)
        assert all(len(row.token_ids) == k for row in drafts), f"{k} drafts wanted: {drafts}"
    return statistics.median(call_ms[_WARM_CALLS:]), statistics.median(launch_ms[_WARM_CALLS:])


def _weights_bytes(config: ModelConfig, itemsize: int) -> int:
    """What a pass of one token reads: all weights, but of the embedding only as far as it is the output layer, too."""
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + config.num_heads * config.head_dim
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    return itemsize * (config.num_layers * layer + config.vocab_size * config.hidden_size)
