"""Checks every kernel of the engine against a wider reference on fresh random inputs, then times it beside its floor.

Files of results are named kernels-PART.json.
"""

import random
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.attention_cases import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, Batch, Shape, random_cache
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.row_sampling import time_rows
from benchmarks.gpu.sizes import BLOCK_SIZE
from benchmarks.gpu.slices import Slices, make_parser
from benchmarks.gpu.timing import copy_bandwidth, graph_us, num_sets, relative_error
from specwire.engine.kernels import layer_ops, layer_ops_torch
from specwire.engine.kernels.work_list import PREFILL_TUNING, AttentionTuning
from specwire.engine.models.config import RopeConfig
from specwire.engine.models.rope import rope_table

_BF16_TOLERANCE = 6e-3
"""Relative error that bfloat16 operands explain (weights of the positions are rounded to it)."""


def check_attention(bandwidth: float) -> list[dict[str, Any]]:
    """Random ragged batches, contexts 1 to 32k, poisoned outputs, one plan and one captured graph for all batches of a shape."""
    rows = []
    for shape in (LLAMA_8B, LLAMA_1B, SMOLLM2_135M):
        cache = random_cache(shape, 400_000)
        for max_query_len in (1, 6, 9):
            rows.append(_check_graph(shape, cache, 24, max_query_len, num_batches=6))
        for _ in range(4):
            segments = [(length := random.choice([1, 5, 17, 40, 333, 1000]), length + random.randrange(5000)) for _ in range(6)]
            batch = Batch.random(shape, segments, cache)
            output = torch.full_like(batch.query, float("nan"))
            batch.attend(batch.plan(AttentionTuning()), output)
            rows.append({"case": f"{shape.name} chunks", "error": relative_error(output, batch.reference())})
    assert all(row["error"] < _BF16_TOLERANCE for row in rows), rows
    return rows


def _check_graph(shape: Shape, cache: torch.Tensor, num_requests: int, max_query_len: int, num_batches: int) -> dict[str, Any]:
    """Largest error over batches that one graph serves; the block tables of the graph are as wide as the longest context."""
    tokens = num_requests * max_query_len
    first = Batch.random(shape, [(max_query_len, 32768)] + [(max_query_len, max_query_len)] * (num_requests - 1), cache)
    plan = first.plan(AttentionTuning(), max_query_len, tokens)
    output = torch.empty_like(first.query)
    plan.update(first.cu_seqlens_q, first.seq_lens)
    first.attend(plan, output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(first.cu_seqlens_q, first.seq_lens)
        first.attend(plan, output)
    worst = 0.0
    for _ in range(num_batches):
        lengths = [random.randint(1, max_query_len) for _ in range(random.randint(1, num_requests))]
        segments = [(length, length + int(32760 ** random.random())) for length in lengths]
        batch = Batch.random(shape, segments + [(0, 0)] * (num_requests - len(segments)), cache)
        first.query[: len(batch.query)].copy_(batch.query)
        first.block_tables[:, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        first.cu_seqlens_q.copy_(batch.cu_seqlens_q)
        first.seq_lens.copy_(batch.seq_lens)
        output.fill_(float("nan"))
        graph.replay()
        worst = max(worst, relative_error(output[: len(batch.query)], batch.reference()))
        assert output[len(batch.query) :].isnan().all(), "a padding row was written"
    assert not plan.scratch.arrived.any()
    return {"case": f"{shape.name} graph, query length 1..{max_query_len}, {num_batches} batches", "error": worst}


def _attention_row(batch: Batch, bandwidth: float, tuning: AttentionTuning, max_query_len: int | None = None, rep_ms: int = 60) -> dict[str, Any]:
    sets = batch.layers(num_sets(batch.num_bytes))
    plan = batch.plan(tuning, max_query_len, len(batch.segments) * max_query_len if max_query_len else None)
    outputs = [torch.full_like(each.query, float("nan")) for each in sets]
    us = graph_us([partial(each.attend, plan, output) for each, output in zip(sets, outputs, strict=True)], rep_ms)
    floor = batch.num_bytes / bandwidth * 1e6
    return {"us": us, "floor_us": floor, "share_of_copy": floor / us, "tflops": batch.num_operations / us * 1e-6, "outputs": outputs}


_DECODE = [(1, 576), (8, 576), (32, 576), (128, 576), (256, 576), (1, 32768), (8, 8192), (64, 4096), (64, 8192), (64, 32768)]


def time_attention(bandwidth: float) -> list[dict[str, Any]]:
    """Decode and verify batches of equal contexts, and of contexts spread over a factor of ten."""
    rows = []
    for shape, cases in ((LLAMA_8B, _DECODE), (LLAMA_1B, [(1, 576), (256, 576), (64, 8192)]), (SMOLLM2_135M, [(1, 576), (256, 576), (64, 8192)])):
        for num_requests, context in cases:
            cache = random_cache(shape, num_requests * context)
            for query_len, max_query_len in ((1, 1), (1, 9), (6, 9), (8, 8)) if shape is LLAMA_8B else ((1, 1), (6, 9)):
                batch = Batch.random(shape, [(query_len, context)] * num_requests, cache)
                row = _attention_row(batch, bandwidth, AttentionTuning(), max_query_len)
                error = relative_error(row.pop("outputs")[0], batch.reference())
                assert error < _BF16_TOLERANCE, (num_requests, context, query_len, error)
                case = f"{shape.name} {num_requests} x {context}"
                rows.append({"case": case, "query_len": query_len, "max_query_len": max_query_len, "error": error, **row})
                if (num_requests, context, query_len, max_query_len) == (256, 576, 1, 9):
                    plan = batch.plan(AttentionTuning(), 9, 9 * 256)
                    rows.append({"case": f"{case}: the work list", "us": graph_us([partial(plan.update, batch.cu_seqlens_q, batch.seq_lens)])})
    generator = random.Random(1)
    ragged = [(1, int(400 * 10 ** generator.random())) for _ in range(256)]
    row = _attention_row(Batch.random(LLAMA_8B, ragged, random_cache(LLAMA_8B, 500_000)), bandwidth, AttentionTuning(), 1)
    del row["outputs"]
    return [*rows, {"case": "llama-8b 256 x 400..4000", "query_len": 1, "max_query_len": 1, **row}]


def time_prefill(bandwidth: float) -> list[dict[str, Any]]:
    """Chunks, beside torch's attention over contiguous keys and values of the same lengths (whose mask fits only whole prompts)."""
    rows = []
    cache = random_cache(LLAMA_8B, 140_000)
    cases = {"256 x 512": [(512, 512)] * 256, "16 x 2048": [(2048, 2048)] * 16, "1 x 8192": [(8192, 8192)], "2048 behind 30720": [(2048, 32768)]}
    cases["2048 of 4096 and 255 decode rows"] = [(2048, 4096)] + [(1, 500)] * 255
    for name, segments in cases.items():
        batch = Batch.random(LLAMA_8B, segments, cache)
        row = _attention_row(batch, bandwidth, PREFILL_TUNING)
        error = relative_error(row.pop("outputs")[0], batch.reference())
        assert error < _BF16_TOLERANCE, (name, error)
        query_len, seq_len = segments[0]
        if query_len == seq_len:
            query, key, value = (torch.randn(len(segments), heads, seq_len, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
            attention = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
            row["torch_contiguous_us"] = graph_us([attention])
        rows.append({"case": f"llama-8b {name}", "error": error, **row})
    return rows


def sweep_attention(bandwidth: float) -> list[dict[str, Any]]:
    """Share of the copy bandwidth for each way to cut the work."""
    batches = [
        (Batch.random(LLAMA_8B, [(query_len, context)] * count, random_cache(LLAMA_8B, count * -(-context // BLOCK_SIZE) * BLOCK_SIZE)), bound)
        for count, context, query_len, bound in _SWEEP
    ]
    rows = []
    for tuning in _TUNINGS:
        row: dict[str, Any] = {"tuning": repr(tuning)}
        for (count, context, query_len, bound), (batch, _) in zip(_SWEEP, batches, strict=True):
            result = _attention_row(batch, bandwidth, tuning, bound, rep_ms=25)
            row[f"{count}x{context} q{query_len}/{bound}"] = round(result["share_of_copy"], 3)
        rows.append(row)
        print(list(row.values()), flush=True)
    return rows


_SWEEP = [(64, 8192, 1, 1), (64, 4096, 1, 1), (64, 4096, 8, 8), (64, 4096, 1, 9), (40, 8192, 1, 9), (20, 4096, 6, 9), (100, 2048, 1, 9)]
_SWEEP += [(256, 600, 1, 6), (128, 576, 1, 6), (128, 600, 1, 6), (128, 600, 6, 6)]
_SWEEP += [(256, 576, 1, 1), (256, 576, 1, 9), (256, 576, 8, 8), (1, 576, 1, 1), (1, 576, 6, 9), (8, 576, 1, 9), (8, 576, 6, 9), (32, 576, 1, 9)]
_SWEEP += [(1, 32768, 1, 1), (8, 8192, 6, 9)]
_TUNINGS = [
    AttentionTuning(),
    AttentionTuning(few_min_split=128),
    AttentionTuning(few_min_split=256),
    AttentionTuning(few_items=49, few_min_split=128),
    AttentionTuning(many_items=132),
    AttentionTuning(staggered=0),
    AttentionTuning(staggered_from=64),
    AttentionTuning(staggered=24),
    AttentionTuning(tile_positions=32, num_stages=7),
    AttentionTuning(tile_rows=32),
]


def sweep_prefill(bandwidth: float) -> list[dict[str, Any]]:
    """TFLOP/s of chunks for several tiles."""
    cache = random_cache(LLAMA_8B, 40_000)
    batches = [Batch.random(LLAMA_8B, segments, cache) for segments in ([(512, 512)] * 64, [(2048, 2048)] * 16, [(2048, 32768)])]
    batches.append(Batch.random(LLAMA_8B, [(2048, 4096)] + [(1, 500)] * 63, cache))
    rows = []
    for rows_of_tile, positions, stages, warps in (
        (64, 64, 5, 4),
        (128, 64, 5, 8),
        (128, 64, 4, 4),
        (128, 64, 3, 8),
        (128, 128, 4, 8),
        (128, 32, 5, 4),
    ):
        tuning = AttentionTuning(tile_rows=rows_of_tile, tile_positions=positions, large_stages=stages, num_warps=warps, many_min_split=4096)
        results = [round(_attention_row(batch, bandwidth, tuning, rep_ms=25)["tflops"]) for batch in batches]
        rows.append({"tuning": repr(tuning), "tflops": results})
        print(list(rows[-1].values()), flush=True)
    return rows


def time_layer_ops(bandwidth: float) -> list[dict[str, Any]]:
    """llama-8b's small operators in bfloat16, beside the torch twins in a graph."""
    cache = random_cache(LLAMA_8B, 65536)
    return [row for num_tokens in (1, 32, 256, 2304) for row in _layer_op_rows(bandwidth, cache, num_tokens)]


def _layer_op_rows(bandwidth: float, cache: torch.Tensor, num_tokens: int) -> list[dict[str, Any]]:
    hidden, heads, kv_heads, head_dim, width = 4096, 32, 8, 128, 14336
    cos, sin = (table.cuda().bfloat16() for table in rope_table(RopeConfig(), head_dim, 4096))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    weight, positions = normal(hidden), torch.randint(0, 4096, (num_tokens,), device="cuda")
    slots = torch.randperm(65536, device="cuda")[:num_tokens]
    operators = {
        "add_rms_norm": (8 * num_tokens * hidden, lambda: (normal(num_tokens, hidden), normal(num_tokens, hidden), weight, 1e-5)),
        "rotary_kv_write": (
            4 * num_tokens * head_dim * (heads + 2 * kv_heads),
            lambda: (normal(num_tokens, heads + 2 * kv_heads, head_dim), cos, sin, positions, slots, cache),
        ),
        "silu_mul": (6 * num_tokens * width, lambda: (normal(num_tokens, 2 * width),)),
    }
    rows = []
    for name, (num_bytes, make) in operators.items():
        kernel, twin = getattr(layer_ops, name), getattr(layer_ops_torch, name)
        arguments = make()
        wide = [each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in arguments]
        error = relative_error(kernel(*arguments), twin(*wide))
        assert error < _BF16_TOLERANCE, (name, num_tokens, error)
        sets = [make() for _ in range(num_sets(num_bytes))]
        us = graph_us([partial(kernel, *each) for each in sets])
        twin_us = graph_us([partial(twin, *each) for each in sets])
        floor = num_bytes / bandwidth * 1e6
        rows.append(
            {"case": f"{name}, {num_tokens} tokens", "error": error, "us": us, "floor_us": floor, "share_of_copy": floor / us, "twin_us": twin_us}
        )
    return rows


_PARTS = {
    "attention-check": check_attention,
    "attention": time_attention,
    "prefill": time_prefill,
    "layer-ops": time_layer_ops,
    "row-sampling": time_rows,
    "sweep": sweep_attention,
    "sweep-prefill": sweep_prefill,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the slices asked for; the sweeps only where they are named."""
    parser = make_parser(__doc__ or "", SECONDS["kernels"])
    parser.set_defaults(only=[name for name in _PARTS if not name.startswith("sweep")])
    slices, options = Slices.parse("kernels", parser, arguments)
    if options.device == "cpu":
        raise SystemExit("these are the kernels of a GPU; tests/engine/kernels runs them in Triton's interpreter")
    seed = time.time_ns()
    random.seed(seed)
    torch.manual_seed(seed)
    bandwidth = copy_bandwidth()
    for name in slices.pending():
        with slices.open(name) as part:
            part.note(seed=seed, copy_bytes_per_s=bandwidth)
            for row in _PARTS[name](bandwidth):
                part.add(row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
