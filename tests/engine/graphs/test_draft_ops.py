"""The kernels around a draft model against their torch twins, number for number, on random uploads and poisoned tensors."""

import random

import pytest
import torch

from specwire.engine.graphs import draft_ops, draft_ops_torch
from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling, DraftUploads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS, MAX_BLOCKS, MAX_TOKENS, K, SCRATCH = 6, 19, 400, 4, 1000
OPS = pytest.mark.parametrize("ops", [draft_ops, draft_ops_torch], ids=["triton", "torch"])


def random_rows(rng: random.Random, uploads: DraftUploads, tables: dict[int, list[int]], *, longest: int) -> list[DraftRow]:
    """Rows of some slots by falling number of drafts; new slots are opened, tables grow."""
    rows = []
    for slot in rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS)):
        if slot not in tables or rng.random() < 0.3:
            tables[slot] = []
            uploads.open(slot, DraftSampling(rng.choice([0.0, 0.7, 1.3]), rng.getrandbits(64), rng.randrange(3)))
        num_tokens, num_drafts = rng.randint(1, longest), rng.randint(0, K)
        start = rng.randint(0, 300 - num_tokens - K)
        while len(tables[slot]) * 16 < start + num_tokens + max(num_drafts - 1, 0):
            tables[slot].append(rng.randrange(1000))
        rows.append(DraftRow(slot, start, [rng.randrange(99) for _ in range(num_tokens)], tables[slot], num_drafts))
    return sorted(rows, key=lambda row: -row.num_drafts)


def poison(source):
    for name in source.__dataclass_fields__:
        getattr(source, name).fill_(77)
    return source


def poisoned_inputs(num_rows: int, num_tokens: int) -> DraftInputs:
    tables = torch.zeros((NUM_SLOTS, MAX_BLOCKS), dtype=torch.int32, device=DEVICE)
    return poison(DraftInputs.allocate(NUM_SLOTS, MAX_TOKENS, tables)).first(num_rows, num_tokens)


def assert_equal(ours, twins, skip=()):
    for name in ours.__dataclass_fields__:
        if name not in skip:
            assert torch.equal(getattr(ours, name), getattr(twins, name)), name


@pytest.mark.parametrize("longest", [5, 60])
def test_kernels_equal_their_twins(longest):
    rng = random.Random(longest)
    uploads = DraftUploads(NUM_SLOTS, MAX_BLOCKS, MAX_TOKENS, DEVICE)
    all_tables = [torch.full((NUM_SLOTS, MAX_BLOCKS), 77, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    known: dict[int, list[int]] = {}
    for _ in range(8):
        rows = random_rows(rng, uploads, known, longest=longest)
        num_tokens = sum(len(row.token_ids) for row in rows)
        num_padded = min(len(rows) + rng.randint(0, 2), NUM_SLOTS)
        uploads.send(rows)
        drawn = [
            (torch.randint(99, (num_padded,), device=DEVICE), torch.rand(num_padded, device=DEVICE))
            for _ in range(K)
        ]  # fmt: skip
        padding = rng.choice([0, 1, 3, 9])
        made = []
        for ops, tables in zip((draft_ops, draft_ops_torch), all_tables, strict=True):
            inputs = poisoned_inputs(num_padded, num_tokens + padding)
            call = poison(DraftRows.allocate(NUM_SLOTS, K, DEVICE)).first(num_padded)
            # Of passes of one token a row the tables are those of the first pass, and the places of tokens stay as they are.
            following = DraftInputs.allocate(num_padded, num_padded, inputs.block_tables)
            ops.write_tables(uploads.on_device, tables)
            ops.prepare(uploads.on_device, tables, inputs, call, 16, SCRATCH)
            before, passes = inputs, []
            for token_ids, probs in drawn:
                ops.advance(before, following, call, token_ids, probs, 16, SCRATCH)
                before = following
                passes.append([getattr(following, name).clone() for name in ("token_ids", "positions", "slot_mapping", "seq_lens")])
            made.append((inputs, call, passes))
        (ours, our_call, our_passes), (twins, twin_call, twin_passes) = made
        assert_equal(ours, twins, skip=("block_tables",))
        assert_equal(our_call, twin_call)
        assert torch.equal(*all_tables)
        for our_pass, twin_pass in zip(our_passes, twin_passes, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(our_pass, twin_pass, strict=True))
        for place, row in enumerate(rows):
            blocks = -(-(row.start_position + len(row.token_ids) + max(row.num_drafts - 1, 0)) // 16)
            assert ours.block_tables[place, :blocks].tolist() == twins.block_tables[place, :blocks].tolist() == row.block_table[:blocks]


@OPS
def test_each_draft_is_the_input_of_the_next_pass(ops):
    """Two rows of 3 and 1 drafts, and padding."""
    uploads = DraftUploads(NUM_SLOTS, MAX_BLOCKS, MAX_TOKENS, DEVICE)
    tables = torch.zeros((NUM_SLOTS, MAX_BLOCKS), dtype=torch.int32, device=DEVICE)
    inputs, call = poisoned_inputs(3, 8), poison(DraftRows.allocate(NUM_SLOTS, K, DEVICE)).first(3)
    following = DraftInputs.allocate(3, 3, inputs.block_tables)
    uploads.open(4, DraftSampling(0.5, 2**64 - 2, 1))
    uploads.open(1, DraftSampling(0.0, 3, 0))
    uploads.send([DraftRow(4, 13, [8, 9], [70, 71], 3), DraftRow(1, 0, [5], [30], 1)])
    ops.write_tables(uploads.on_device, tables)
    ops.prepare(uploads.on_device, tables, inputs, call, 16, SCRATCH)
    assert inputs.token_ids.tolist() == [8, 9, 5, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [13, 14, 0, 0, 0, 0, 0, 0]
    assert inputs.slot_mapping.tolist() == [70 * 16 + 13, 70 * 16 + 14, 30 * 16] + [SCRATCH * 16] * 5
    assert inputs.cu_seqlens_q.tolist() == [0, 2, 3, 3]
    assert inputs.seq_lens.tolist() == [15, 1, 0]
    assert (call.last_rows.tolist(), call.num_drafts.tolist()) == ([1, 2, 0], [3, 1, 0])
    assert (call.temperatures.tolist(), call.keys.tolist(), call.choices.tolist()) == ([0.5, 0.0, 0.0], [-2, 3, 0], [1, 0, 0])

    def advance(before, *token_ids):
        ops.advance(before, following, call, torch.tensor(token_ids, device=DEVICE), torch.tensor([0.25, 0.5, 1.0], device=DEVICE), 16, SCRATCH)
        return [following.token_ids.tolist(), following.positions.tolist(), following.slot_mapping.tolist(), following.seq_lens.tolist()]

    assert advance(inputs, 11, 12, 13) == [[11, 0, 0], [15, 0, 0], [70 * 16 + 15, SCRATCH * 16, SCRATCH * 16], [16, 0, 0]]
    assert advance(following, 21, 22, 23) == [[21, 0, 0], [16, 0, 0], [71 * 16, SCRATCH * 16, SCRATCH * 16], [17, 0, 0]]
    assert advance(following, 31, 32, 33) == [[0, 0, 0], [0, 0, 0], [SCRATCH * 16] * 3, [0, 0, 0]]
    assert advance(following, 41, 42, 43) == [[0, 0, 0], [0, 0, 0], [SCRATCH * 16] * 3, [0, 0, 0]]
    assert call.results[:, 0].tolist() == [[11, 21, 31, 77], [12, 77, 77, 77], [77] * 4]
    assert call.results[0, 1, :3].view(torch.float32).tolist() == [0.25] * 3
    assert call.results[1, 1, :1].view(torch.float32).tolist() == [0.5]


def test_an_upload_holds_only_what_is_new():
    uploads = DraftUploads(NUM_SLOTS, MAX_BLOCKS, MAX_TOKENS, DEVICE)
    uploads.open(2, DraftSampling(0.5, 2**64 - 2, 1))
    assert uploads.send([DraftRow(2, 14, [8, 9], [70], 2)]) == 3 + 8 + 3 + 2
    assert uploads.on_device[:16].tolist() == [1, 1, 2, 2, 2, 14, 2, 1056964608, -2, -1, 1, 2, 0, 70, 8, 9]
    assert uploads.send([DraftRow(2, 16, [9], [70, 71], 1)]) == 3 + 8 + 3 + 1
    assert uploads.on_device[:15].tolist() == [1, 1, 1, 2, 1, 16, 1, 1056964608, -2, -1, 1, 2, 1, 71, 9]
    assert uploads.send([DraftRow(2, 17, [3], [70, 71], 1)]) == 3 + 8 + 1
    uploads.open(2, DraftSampling(0.0, 5, 0))
    assert uploads.send([DraftRow(2, 0, [3], [9], 1)]) == 3 + 8 + 3 + 1
    assert uploads.on_device[7:14].tolist() == [0, 5, 0, 0, 2, 0, 9]
