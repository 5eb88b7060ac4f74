"""The attention kernel against float64 attention, on ragged batches with poisoned outputs and blocks."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from specwire.engine.kernels.paged_attention import paged_attention
from specwire.engine.kernels.work_list import AttentionScratch, AttentionTuning, DeviceAttentionPlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 16
TUNING = AttentionTuning(
    tile_rows=32, tile_positions=16, few_items=6, few_min_split=32, many_items=9, many_min_split=48, num_stages=2, large_stages=2
)

BATCHES = {
    "one decode row": [(1, 1)],
    "decode rows": [(1, 5), (1, 150), (1, 17), (1, 16)],
    "a split longer than the rest": [(1, 3), (1, 200), (1, 33)],
    "verify rows of every length": [(length, 40 + 9 * length) for length in range(1, 7)],
    "rows that see nothing of the last split": [(6, 131)],
    "a chunk of several tiles": [(23, 90), (1, 40)],
    "padding": [(1, 40), (0, 0), (2, 21), (1, 0), (0, 0)],
}


def random_batch(segments, num_heads, num_kv_heads, head_dim, dtype, seed):
    """(query, cache, cu_seqlens_q, seq_lens, block_tables); slots that no segment owns hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-seq_len // BLOCK_SIZE) for _, seq_len in segments]
    order = (torch.randperm(sum(num_blocks), generator=generator) + 1).tolist()
    cache = torch.full((len(order) + 2, BLOCK_SIZE, 2, num_kv_heads, head_dim), float("nan"))
    block_tables = torch.zeros(len(segments), max(num_blocks), dtype=torch.int32)
    for row, (_, seq_len) in enumerate(segments):
        blocks = [order.pop() for _ in range(num_blocks[row])]
        block_tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for index, block in enumerate(blocks):
            filled = min(BLOCK_SIZE, seq_len - index * BLOCK_SIZE)
            cache[block, :filled] = torch.randn(filled, 2, num_kv_heads, head_dim, generator=generator)
    query_lens = torch.tensor([0, *(query_len for query_len, _ in segments)])
    query = torch.randn(int(query_lens.sum()), num_heads, head_dim, generator=generator)
    seq_lens = torch.tensor([seq_len for _, seq_len in segments], dtype=torch.int32)
    return query.to(DEVICE, dtype), cache.to(DEVICE, dtype), query_lens.cumsum(0).int().to(DEVICE), seq_lens.to(DEVICE), block_tables.to(DEVICE)


def expected(query, cache, cu_seqlens_q, seq_lens, block_tables, scale):
    """float64; NaN in the rows of no request."""
    group = query.shape[1] // cache.shape[3]
    output = torch.full(query.shape, float("nan"), dtype=torch.float64, device=query.device)
    starts = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[row : row + 2]
        if seq_len and last > first:
            kv = cache[block_tables[row].long()].flatten(0, 1)[:seq_len].double()
            key, value = (kv[:, side].repeat_interleave(group, 1).transpose(0, 1) for side in (0, 1))  # [H, L, D]
            score = query[first:last].double().transpose(0, 1) @ key.transpose(1, 2) * scale  # [H, Q, L]
            visible = torch.ones(last - first, seq_len, dtype=torch.bool, device=query.device).tril(seq_len - (last - first))
            output[first:last] = (score.masked_fill(~visible, -math.inf).softmax(-1) @ value).transpose(0, 1)
    return output


def run(plan, query, cache, cu_seqlens_q, seq_lens, block_tables, scale):
    output = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
    plan.update(cu_seqlens_q, seq_lens)
    paged_attention(query, cache, block_tables, scale, plan, output)
    return output


@pytest.mark.parametrize("staggered", [1, 5])
def test_requests_that_are_cut_at_different_places(staggered):
    """More requests than are cut, and among them some that can't be: of one tile, of several row tiles, or split anyway."""
    segments = [(1, 70), (2, 15), (0, 0), (1, 33), (20, 50), (1, 150), (1, 64), (3, 65), (1, 70), (1, 17)]
    arguments = random_batch(segments, 6, 2, 16, torch.float32, seed=staggered)
    tuning = dataclasses.replace(TUNING, few_items=3, many_min_split=96, staggered=staggered, staggered_from=4)
    plan = DeviceAttentionPlan(AttentionScratch(2, 16, DEVICE, tuning), len(segments), 64, 32, 6)
    torch.testing.assert_close(run(plan, *arguments, 0.25).double(), expected(*arguments, 0.25), atol=1e-5, rtol=0, equal_nan=True)
    splits = plan.items[:, 7] // 65536
    cut = plan.items[(splits == 2) & (plan.items[:, 7] % 65536 == 0)]
    assert len(cut) >= staggered
    assert len(cut[:, 5].unique()) >= min(staggered, 3), "all were cut at the same place"
    assert not plan.scratch.arrived.any()


@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 16), ((4, 1), 64)], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_equals_float64_attention(name, heads, head_dim):
    segments = BATCHES[name]
    arguments = random_batch(segments, *heads, head_dim, torch.float32, seed=len(name))
    plan = DeviceAttentionPlan(AttentionScratch(heads[1], head_dim, DEVICE, TUNING), len(segments), 64, 32, heads[0])
    scale = head_dim**-0.5
    torch.testing.assert_close(run(plan, *arguments, scale).double(), expected(*arguments, scale), atol=1e-5, rtol=0, equal_nan=True)
    assert not plan.scratch.arrived.any()


@pytest.mark.parametrize("few_items", [3, 64])
def test_without_causality_every_query_sees_all_positions(few_items):
    """A block of a draft head: as one query a request would, whether requests are split or not."""
    segments = [(7, 20), (7, 33), (0, 0), (7, 7), (7, 150), (3, 64)]
    query, cache, starts, seq_lens, tables = random_batch(segments, 6, 2, 16, torch.float32, seed=3)
    tuning = dataclasses.replace(TUNING, few_items=few_items)
    plan = DeviceAttentionPlan(AttentionScratch(2, 16, DEVICE, tuning), len(segments), 64, 32, 6, is_causal=False)
    rows = torch.tensor([row for row, (count, _) in enumerate(segments) for _ in range(count)], device=query.device)
    singly = torch.arange(len(rows) + 1, dtype=torch.int32, device=query.device)
    actual = run(plan, query, cache, starts, seq_lens, tables, 0.25).double()
    torch.testing.assert_close(actual, expected(query, cache, singly, seq_lens[rows], tables[rows], 0.25), atol=1e-5, rtol=0)
    assert not plan.scratch.arrived.any()


def test_16_bit_numbers_sum_in_float32():
    """Triton's interpreter multiplies no bfloat16."""
    segments = [(1, 100), (5, 40), (12, 12)]
    arguments = random_batch(segments, 4, 1, 128, torch.bfloat16 if DEVICE == "cuda" else torch.float16, seed=1)
    plan = DeviceAttentionPlan(AttentionScratch(1, 128, DEVICE, TUNING), 3, 18, 12, 4)
    output, reference = run(plan, *arguments, 0.1).double(), expected(*arguments, 0.1)
    assert (output - reference).norm() / reference.norm() < 5e-3


def test_one_plan_serves_whatever_lengths_come():
    """The same tensors and grid, as a captured graph has them; queries are a view of a wider tensor."""
    plan = DeviceAttentionPlan(AttentionScratch(2, 16, DEVICE, TUNING), 5, 30, 6, 4)
    for seed, segments in enumerate([[(1, 300), (1, 2), (6, 40)], [(6, 6)] * 5, [(1, 9)], [(4, 250), (1, 31), (2, 100), (1, 64)]]):
        segments = segments + [(0, 0)] * (5 - len(segments))
        query, *rest = random_batch(segments, 4, 2, 16, torch.float32, seed)
        wide = torch.cat((query, torch.full_like(query, float("nan"))), 1)[:, :4]
        torch.testing.assert_close(run(plan, wide, *rest, 0.25).double(), expected(query, *rest, 0.25), atol=1e-5, rtol=0, equal_nan=True)


def test_work_is_cut_to_equal_shares():
    """Of 6 wanted pieces the long request gets most; every item lies inside its sequence, and none is missing."""
    plan = DeviceAttentionPlan(AttentionScratch(1, 16, DEVICE, TUNING), 4, 40, 36, 2)
    query_lens, seq_lens = [1, 2, 0, 36], [640, 48, 7, 36]
    cu_seqlens_q = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    plan.items.fill_(2**30)  # what an earlier step left
    plan.update(cu_seqlens_q, torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE))
    items = [item for item in plan.items.tolist() if item[7]]
    assert len(items) == 8
    # The share is (40 + 3 + 3 * 3 tiles of positions) / 6 = 9 tiles, so the 40 tiles of the first request make 4 splits of 10.
    assert [(item[4], item[5], item[7]) for item in items if item[6] == 0] == [(160 * i, 160 * (i + 1), 4 * 65536 + i) for i in range(4)]
    assert [item[6] for item in items] == [0] * 4 + [1] + [3] * 3
    assert [(item[0], item[1], item[2], item[3], item[5]) for item in items[4:]] == [
        (1, 4, 0, 46, 48),
        (3, 72, 64, 0, 36),
        (3, 72, 32, 0, 32),
        (3, 72, 0, 0, 16),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_every_position_that_a_row_sees_is_in_one_item(seed):
    """Items with splits also have a place in the scratch, and the rest of the list is empty."""
    generator = np.random.default_rng(seed)
    num_requests, group = 9, 3
    query_lens = generator.choice([0, 1, 1, 6, 25], num_requests)
    seq_lens = np.where(generator.random(num_requests) < 0.2, 0, query_lens + (3 ** (7 * generator.random(num_requests))).astype(int))
    starts = np.concatenate(([0], query_lens.cumsum()))
    plan = DeviceAttentionPlan(AttentionScratch(1, 16, DEVICE, TUNING), num_requests, 9 * 25, 25, group)
    plan.items.fill_(2**30)
    plan.update(torch.from_numpy(starts).int().to(DEVICE), torch.from_numpy(seq_lens).int().to(DEVICE))
    seen = [np.zeros((query_len * group, seq_len), dtype=int) for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
    for place, (query_start, num_rows, row_begin, context_len, kv_begin, kv_end, request, splits) in enumerate(plan.items.tolist()):
        if splits == 0:
            continue
        assert (query_start, num_rows) == (starts[request], query_lens[request] * group)
        assert context_len == seq_lens[request] - query_lens[request]
        assert splits < 2 * 65536 or place < plan.scratch.num_items
        seen[request][row_begin : row_begin + plan.tile_rows, kv_begin:kv_end] += 1
    for counts, query_len, seq_len in zip(seen, query_lens, seq_lens, strict=True):
        visible = np.arange(seq_len) <= (seq_len - query_len + np.arange(query_len).repeat(group))[:, None]
        assert (counts[visible] == 1).all()
        assert counts.max(initial=0) <= 1
