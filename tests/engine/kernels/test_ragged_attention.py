"""The torch twin of ragged attention against attention computed one query at a time."""

import math

import numpy as np
import pytest
import torch

from specwire.engine.kernels import ragged_attention as module
from specwire.engine.kernels.ragged_attention import plan_attention, ragged_attention, slot_table

BLOCK_SIZE, HEAD_DIM = 16, 16

BATCHES = {
    "one decode row": [(1, 40)],
    "decode rows of equal length": [(1, 40), (1, 40), (1, 40)],
    "decode rows of different lengths": [(1, 5), (1, 300), (1, 17), (1, 1), (1, 290)],
    "verify rows": [(6, 50), (6, 90), (6, 6)],
    "mixed query lengths": [(1, 40), (6, 45), (3, 200), (1, 199), (2, 2)],
    "prefill from nothing": [(100, 100)],
    "prefill chunk behind a prefix": [(50, 130)],
    "everything": [(1, 40), (100, 170), (6, 45), (33, 33), (3, 600), (1, 3)],
}


def random_batch(segments: list[tuple[int, int]], num_heads: int, num_kv_heads: int, seed: int = 0):
    """(query, cache, cu_seqlens_q, seq_lens, block_tables) with blocks in random order; slots that no segment owns hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-seq_len // BLOCK_SIZE) for _, seq_len in segments]
    order = torch.randperm(sum(num_blocks), generator=generator).tolist()
    cache = torch.full((len(order) + 3, BLOCK_SIZE, 2, num_kv_heads, HEAD_DIM), float("nan"))
    block_tables = torch.zeros(len(segments), max(num_blocks), dtype=torch.int32)
    for row, (_, seq_len) in enumerate(segments):
        blocks = [order.pop() + 1 for _ in range(num_blocks[row])]
        block_tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(seq_len):
            cache[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = torch.randn(2, num_kv_heads, HEAD_DIM, generator=generator)
    query_lens = torch.tensor([query_len for query_len, _ in segments])
    cu_seqlens_q = torch.cat((torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0))).int()
    seq_lens = torch.tensor([seq_len for _, seq_len in segments], dtype=torch.int32)
    query = torch.randn(int(query_lens.sum()), num_heads, HEAD_DIM, generator=generator)
    return query, cache, cu_seqlens_q, seq_lens, block_tables


def expected_attention(query, cache, cu_seqlens_q, seq_lens, block_tables, scale):
    group = query.shape[1] // cache.shape[3]
    output = torch.empty_like(query)
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, last = cu_seqlens_q[row : row + 2].tolist()
        kv = torch.cat([cache[block] for block in block_tables[row, : -(-seq_len // BLOCK_SIZE)].tolist()])[:seq_len].double()
        for token in range(first, last):
            visible = seq_len - (last - first) + (token - first) + 1
            for head in range(query.shape[1]):
                key, value = kv[:visible, 0, head // group], kv[:visible, 1, head // group]
                output[token, head] = ((key @ query[token, head].double()) * scale).softmax(0) @ value
    return output


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=lambda heads: f"{heads[0]}-{heads[1]}")
@pytest.mark.parametrize("name", BATCHES)
def test_equals_attention_one_query_at_a_time(name, heads):
    arguments = random_batch(BATCHES[name], *heads)
    scale = 1 / math.sqrt(HEAD_DIM)
    output = ragged_attention(*arguments, scale)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected_attention(*arguments, scale), atol=1e-5, rtol=0)


def test_a_plan_made_once_gives_the_same_result():
    query, cache, cu_seqlens_q, seq_lens, block_tables = random_batch(BATCHES["everything"], 6, 2)
    slots = slot_table(block_tables.numpy(), BLOCK_SIZE)
    plan = plan_attention(cu_seqlens_q.long().numpy(), seq_lens.long().numpy(), slots, 3, "cpu", torch.float32)
    planned = ragged_attention(query, cache, cu_seqlens_q, seq_lens, block_tables, 0.3, plan=plan)
    assert torch.equal(planned, ragged_attention(query, cache, cu_seqlens_q, seq_lens, block_tables, 0.3))


def test_long_chunks_are_sliced_and_rows_are_grouped_by_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_QUERY_SLICE", 40)
    arguments = random_batch([(100, 170), (1, 40), (2, 60), (1, 1000), (5, 900)], 4, 2)
    _, _, cu_seqlens_q, seq_lens, block_tables = arguments
    plan = plan_attention(cu_seqlens_q.long().numpy(), seq_lens.long().numpy(), slot_table(block_tables.numpy(), BLOCK_SIZE), 2, "cpu", torch.float32)
    assert [(call.num_rows, call.num_queries, call.num_positions) for call in plan.calls] == [
        (2, 5, 1024),
        (2, 2, 64),
        (1, 40, 128),
        (1, 40, 160),
        (1, 20, 192),
    ]
    torch.testing.assert_close(ragged_attention(*arguments, 0.25, plan=plan), expected_attention(*arguments, 0.25), atol=1e-5, rtol=0)


def test_equal_decode_rows_need_no_index_and_no_mask():
    _, _, cu_seqlens_q, seq_lens, block_tables = random_batch([(1, 64)] * 4, 4, 2)
    plan = plan_attention(cu_seqlens_q.long().numpy(), seq_lens.long().numpy(), slot_table(block_tables.numpy(), BLOCK_SIZE), 2, "cpu", torch.float32)
    assert len(plan.calls) == 1
    assert plan.calls[0].query_rows == slice(0, 4)
    assert plan.calls[0].mask is None
    assert np.prod(plan.calls[0].slots.shape) == 4 * 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
def test_runs_on_cuda(name):
    arguments = random_batch(BATCHES[name], 6, 2)
    output = ragged_attention(*(argument.cuda() for argument in arguments), 0.25)
    torch.testing.assert_close(output.cpu(), expected_attention(*arguments, 0.25), atol=1e-4, rtol=0)
