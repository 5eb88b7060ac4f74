"""What the programs of one attention launch do: a list of tiles and splits that the device makes from the lengths, once per step."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

RECORD = 8
"""int32 numbers of an item: query_start, num_rows, row_begin, context_len, kv_begin, kv_end, request, num_splits * 65536 + split (0: no item)."""
SMALL_ROWS = 16
"""Tiles of at most this many rows, the fewest that the matrix units take, have a code path of their own."""
_WRITERS = 16
"""Programs that write the list side by side; each derives the whole of it."""


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """How the attention kernel cuts its work; the defaults were measured on an H200 (docs/performance.md).

    Args:
        tile_rows: most rows (queries x heads of a group) of a tile.
        tile_positions: positions of keys and values that one loop iteration takes.
        few_items, few_min_split: steps of at most few_items tiles are cut into about that many pieces for each KV head, so that each
            multiprocessor has about two programs; no piece is shorter than few_min_split positions, a multiple of tile_positions.
        many_items, many_min_split: likewise for larger steps, whose pieces are small enough that none runs long after the others.
        staggered: requests of one tile that larger steps cut in two, each at another place: where all requests are equally long, programs would
            else begin and end together, and memory is idle in between.
        staggered_from: steps of so many tiles and more do that; with fewer, a tile that runs long leaves others without work.
        num_stages, large_stages: depth of the software pipeline of small and large tiles. Block tables take a part of the stages: two tiles
            of keys and values are under way at 5, three at 7.
        num_warps: warps of a program.
    """

    tile_rows: int = 64
    tile_positions: int = 64
    few_items: int = 33
    few_min_split: int = 192
    many_items: int = 264
    many_min_split: int = 2048
    staggered: int = 12
    staggered_from: int = 160
    num_stages: int = 5
    large_stages: int = 5
    num_warps: int = 4


PREFILL_TUNING = AttentionTuning(tile_rows=128, many_min_split=4096, staggered=0, num_warps=8)
"""For steps with long chunks: large tiles read keys and values less often, and decode rows beside them pay a little."""


class AttentionScratch:
    """Partial results of split tiles, shared by all layers, steps and graphs that run one after the other.

    Args:
        num_kv_heads, head_dim: the model's.
        device: the queries'.
        tuning: of all plans that use the scratch.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, device: torch.device | str, tuning: AttentionTuning) -> None:
        # A split has at least its share of all positions: there can't be more.
        self.num_items = max(tuning.few_items, tuning.many_items + 2 * tuning.staggered)
        self.tuning = tuning
        self.num_kv_heads = num_kv_heads
        self.output = torch.empty((self.num_items, num_kv_heads, tuning.tile_rows, head_dim), dtype=torch.float32, device=device)
        self.stats = torch.empty((2, self.num_items, num_kv_heads, tuning.tile_rows), dtype=torch.float32, device=device)
        self.arrived = torch.zeros((self.num_items, num_kv_heads), dtype=torch.int32, device=device)  # zero again after every launch


class DeviceAttentionPlan:
    """The list of one step, in tensors of fixed size: a captured graph replays it with whatever lengths it then finds.

    The launch grid covers the most items that any step within the bounds can have; programs without one end at once. A request whose
    positions are two shares of the step's or more is split; a split writes its partial result, and the last one to
    finish merges them. Requests of length 0 have no items.

    Args:
        scratch: for partial results.
        num_requests: rows of cu_seqlens_q - 1, seq_lens and block_tables.
        max_num_tokens: most query tokens of a step.
        max_query_len: most query tokens of one request.
        num_heads: query heads of the model.
        is_causal: else every query of a request sees all of its positions.
    """

    def __init__(
        self, scratch: AttentionScratch, num_requests: int, max_num_tokens: int, max_query_len: int, num_heads: int, *, is_causal: bool = True
    ) -> None:
        tuning = scratch.tuning
        self.scratch = scratch
        self.num_requests, self.is_causal = num_requests, is_causal
        self.group = num_heads // scratch.num_kv_heads
        self.tile_rows = min(tuning.tile_rows, max(triton.next_power_of_2(max_query_len * self.group), SMALL_ROWS))
        tiles = triton.cdiv(max_query_len * self.group, self.tile_rows)
        max_tiles = min(num_requests * tiles, num_requests + max_num_tokens * self.group // self.tile_rows)
        self.max_items = max_tiles + (tuning.few_items if max_tiles <= tuning.few_items else scratch.num_items)
        self.items = torch.zeros((self.max_items, RECORD), dtype=torch.int32, device=scratch.output.device)

    def update(self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Makes the list from cu_seqlens_q [num_requests + 1] and seq_lens [num_requests], int32 on the device; waits for nothing."""
        assert seq_lens.shape[0] == self.num_requests, (seq_lens.shape, self.num_requests)
        tuning = self.scratch.tuning
        write_items[(_WRITERS,)](
            cu_seqlens_q,
            seq_lens,
            self.items,
            self.num_requests,
            self.max_items,
            REQUESTS=triton.next_power_of_2(self.num_requests),
            GROUP=self.group,
            TILE_ROWS=self.tile_rows,
            TILE_POSITIONS=tuning.tile_positions,
            CAUSAL=self.is_causal,
            FEW_ITEMS=tuning.few_items,
            FEW_MIN=tuning.few_min_split // tuning.tile_positions,
            MANY_ITEMS=tuning.many_items,
            MANY_MIN=tuning.many_min_split // tuning.tile_positions,
            STAGGERED=tuning.staggered,
            STAGGERED_FROM=tuning.staggered_from,
            RECORD=RECORD,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_requests", "max_items"])
def write_items(
    cu_seqlens_q,
    seq_lens,
    items,
    num_requests,
    max_items,
    REQUESTS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_POSITIONS: tl.constexpr,
    CAUSAL: tl.constexpr,
    FEW_ITEMS: tl.constexpr,
    FEW_MIN: tl.constexpr,
    MANY_ITEMS: tl.constexpr,
    MANY_MIN: tl.constexpr,
    STAGGERED: tl.constexpr,
    STAGGERED_FROM: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Tiles of split requests first: they take longest, and their places in the list are their places in the scratch."""
    request = tl.arange(0, REQUESTS)
    real = request < num_requests
    query_start = tl.load(cu_seqlens_q + request, real, 0)
    query_len = tl.load(cu_seqlens_q + request + 1, real, 0) - query_start
    seq_len = tl.load(seq_lens + request, real, 0)
    query_len = tl.where(seq_len > 0, query_len, 0)
    num_rows = query_len * GROUP
    tiles = tl.cdiv(num_rows, TILE_ROWS)

    # In tiles of positions: int32 holds the sum for any batch that fits on a device.
    length = tl.cdiv(seq_len, TILE_POSITIONS)
    total = tl.sum(tiles * length, 0)
    is_few = tl.sum(tiles, 0) <= FEW_ITEMS
    share = tl.maximum(tl.cdiv(total, tl.where(is_few, FEW_ITEMS, MANY_ITEMS)), tl.where(is_few, FEW_MIN, MANY_MIN))
    split_length = tl.maximum(tl.cdiv(length, tl.maximum(length // share, 1)), 1)
    splits = tl.maximum(tl.cdiv(length, split_length), 1)
    if STAGGERED > 0:
        can = (splits == 1) & (tiles == 1) & (length > 1)
        rank = tl.cumsum(can.to(tl.int32), 0) - 1
        cut = can & (rank < STAGGERED) & (is_few == 0) & (tl.sum(tiles, 0) >= STAGGERED_FROM)
        splits = tl.where(cut, 2, splits)
        split_length = tl.where(cut, 1 + rank % tl.maximum(length - 1, 1), split_length)

    num_items = tiles * splits
    in_splits = tl.where(splits > 1, num_items, 0)
    whole = num_items - in_splits
    num_in_splits = tl.sum(in_splits, 0)
    first = tl.where(splits > 1, tl.cumsum(in_splits, 0) - in_splits, num_in_splits + tl.cumsum(whole, 0) - whole)
    count = num_in_splits + tl.sum(whole, 0)

    for item in range(tl.program_id(0), tl.max(num_items, 0), tl.num_programs(0)):
        mine = item < num_items
        split = item % splits
        row_begin = (tiles - 1 - item // splits) * TILE_ROWS  # the last rows see most positions: begin with them
        last_token = (tl.minimum(row_begin + TILE_ROWS, num_rows) - 1) // GROUP
        kv_begin = split * split_length * TILE_POSITIONS
        record = items + (first + item) * RECORD
        tl.store(record, query_start, mine)
        tl.store(record + 1, num_rows, mine)
        tl.store(record + 2, row_begin, mine)
        tl.store(record + 3, seq_len - query_len, mine)
        tl.store(record + 4, kv_begin, mine)
        end = seq_len - query_len + last_token + 1 if CAUSAL else seq_len
        tl.store(record + 5, tl.where(split == splits - 1, end, tl.minimum(kv_begin + split_length * TILE_POSITIONS, end)), mine)
        tl.store(record + 6, request, mine)
        tl.store(record + 7, splits * 65536 + split, mine)
    for block in range(tl.program_id(0), tl.cdiv(max_items, REQUESTS), tl.num_programs(0)):
        unused = block * REQUESTS + request
        tl.store(items + unused * RECORD + 7, tl.zeros_like(unused), (unused >= count) & (unused < max_items))
