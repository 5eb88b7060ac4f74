"""The kernels around the model against their torch twins, number for number, on random uploads and poisoned tensors."""

import random

import pytest
import torch

from specwire.engine.graphs import round_ops, round_ops_torch
from specwire.engine.graphs.asks import ASKED
from specwire.engine.graphs.tensors import DEAD, RoundInputs, RoundLimits, SlotState
from specwire.engine.graphs.upload import RoundRow, Uploads
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = RoundLimits(max_num_seqs=6, max_num_draft_tokens=4, max_num_batched_tokens=400, max_model_len=300)
MAX_BLOCKS, SCRATCH = 19, 1000


def random_rows(rng: random.Random, uploads: Uploads, tables: dict[int, list[int]], *, longest: int) -> list[RoundRow]:
    """Rows of some slots; new slots are opened, tables grow."""
    rows = []
    for slot in rng.sample(range(LIMITS.max_num_seqs), rng.randint(1, LIMITS.max_num_seqs)):
        temperature = rng.choice([0.0, 0.7, 1.3])
        params = SamplingParams(temperature=temperature, top_p=0.7, frequency_penalty=rng.choice([0.0, 0.5]), logprobs=rng.choice([None, 4]))
        rates = rng.choice([None, None, (0.9, 0.8, 0.1), (1.0, 0.6, 0.6, 0.6, 0.6)])
        sampling = SlotSampling(
            params, key=rng.getrandbits(64), choice=rng.randrange(3), vocab_size=99, token_ids=[1], num_prompt_tokens=1, synthetic_rates=rates
        )
        if slot not in tables or rng.random() < 0.3:
            tables[slot] = []
            uploads.open(slot, sampling)
        from_device = rng.random() < 0.4
        num_tokens = 1 if from_device else rng.randint(1, longest)
        num_drafts = 0 if from_device else rng.randint(0, min(num_tokens - 1, LIMITS.max_num_draft_tokens))
        start = rng.randint(0, 300 - num_tokens)
        while len(tables[slot]) * 16 < start + num_tokens:
            tables[slot].append(rng.randrange(1000))
        tokens = [rng.randrange(4) for _ in range(num_tokens)]
        samples = num_drafts > 0 or rng.random() < 0.7
        rows.append(RoundRow(slot, start, tokens, num_drafts, tables[slot], sampling, samples=samples, from_device=from_device))
    return rows


def poisoned(source):
    """A copy whose every number is another."""
    values = (getattr(source, name) for name in source.__dataclass_fields__)
    return type(source)(*(tensor.clone().fill_(77) for tensor in values))


def assert_equal(ours, twins, skip=()):
    for name in ours.__dataclass_fields__:
        if name not in skip:
            assert torch.equal(getattr(ours, name), getattr(twins, name)), name


@pytest.mark.parametrize("longest", [5, 60])
def test_kernels_equal_their_twins(longest):
    rng = random.Random(longest)
    uploads = Uploads(LIMITS, MAX_BLOCKS, 1, DEVICE)
    states = [poisoned(SlotState.allocate(LIMITS, 16, DEVICE, 99)) for _ in range(2)]
    tables: dict[int, list[int]] = {}
    for _ in range(12):
        rows = random_rows(rng, uploads, tables, longest=longest)
        num_tokens, num_outputs = sum(len(row.token_ids) for row in rows), sum(1 + row.num_drafts for row in rows)
        sizes = (min(len(rows) + rng.randint(0, 2), 6), num_tokens + rng.choice([0, 1, 3, 9]), num_outputs + rng.choice([0, 2, 5]))
        all_inputs = []
        states[0].last_tokens[rng.randrange(6)] = -1
        states[1].last_tokens.copy_(states[0].last_tokens)
        targets = torch.tensor([rng.choice([-1, 0, 1, 2, 3, 3]) for _ in range(sizes[2])], device=DEVICE)
        uploads.send(rows, 0)
        for ops, state in zip((round_ops, round_ops_torch), states, strict=True):
            inputs = poisoned(RoundInputs.allocate(LIMITS, MAX_BLOCKS, DEVICE)).first(*sizes)
            ops.apply_changes(uploads.on_device, state)
            ops.prepare(uploads.on_device, state, inputs, 16, SCRATCH)
            ops.accept(uploads.on_device, state, inputs, targets)
            all_inputs.append(inputs)
        ours, twins = all_inputs
        assert_equal(ours, twins, skip=("block_tables", "results", "slots"))
        assert torch.equal(ours.slots[: len(rows)], twins.slots[: len(rows)])
        assert_equal(*states)
        for index, row in enumerate(rows):
            length = int(ours.seq_lens[index])
            blocks = -(-length // 16)
            assert ours.block_tables[index, :blocks].tolist() == twins.block_tables[index, :blocks].tolist() == row.block_table[:blocks]
            written = 2 + row.num_drafts
            assert ours.results[index, :written].tolist() == twins.results[index, :written].tolist()
        assert (ours.results[len(rows) :] == 77).all()
        last_token_checks = [(ours.seq_lens[i] == 0) == (ours.results[i, 0] == DEAD) for i in range(len(rows))]
        assert all(last_token_checks)


def test_an_upload_holds_only_what_is_new():
    uploads = Uploads(LIMITS, MAX_BLOCKS, 1, DEVICE)
    sampling = SlotSampling(SamplingParams(temperature=0.5), key=2**64 - 2, choice=1, vocab_size=99, token_ids=[1], num_prompt_tokens=1)
    uploads.open(2, sampling)
    row = RoundRow(2, 14, [8, 9], 1, [70], sampling)
    assert uploads.send([row], 0).size == 4 + 5 + 22 + 3 + 2
    opened = [2, 1056964608, -2, -1, 1, *[0] * (ASKED + 2 * LIMITS.max_num_draft_tokens)]
    assert uploads.on_device[:36].tolist() == [1, 1, 1, 2, 2, 2, 14, 2, 2, *opened, 2, 0, 70, 8, 9]
    assert uploads.send([RoundRow(2, 16, [9], 0, [70, 71], sampling, from_device=True)], 0).size == 4 + 5 + 3 + 1
    assert uploads.on_device[:13].tolist() == [1, 0, 1, 1, 2, 1, 16, 1, 3, 2, 1, 71, 9]


@pytest.mark.parametrize("ops", [round_ops, round_ops_torch], ids=["triton", "torch"])
@pytest.mark.parametrize(
    ("drafts", "targets", "samples", "result", "last_token"),
    [
        ([], [7], True, [0, 7], 7),
        ([], [7], False, [0], 5),
        ([1, 2], [1, 2, 3], True, [2, 1, 2, 3], 3),
        ([1, 2], [1, 9, 3], True, [1, 1, 9], 9),
        ([1, 2], [8, 2, 3], True, [0, 8], 8),
        ([1, 2, 3, 0], [1, 2, 3, 0, 6], True, [4, 1, 2, 3, 0, 6], 6),
        ([1, 2], [1, -1, 3], True, [-2, 1], -1),
        ([1, 2], [8, -1, 3], True, [0, 8], 8),  # bad behind the mismatch: nobody sees it
        ([], [-1], True, [-1], -1),
        ([], [-1], False, [-1], -1),
    ],
)
def test_acceptance(ops, drafts, targets, samples, result, last_token):
    sampling = SlotSampling(SamplingParams(temperature=0.0), key=1, vocab_size=99, token_ids=[1], num_prompt_tokens=1)
    uploads, state = Uploads(LIMITS, MAX_BLOCKS, 1, DEVICE), SlotState.allocate(LIMITS, 16, DEVICE)
    inputs = RoundInputs.allocate(LIMITS, MAX_BLOCKS, DEVICE).first(6, 24, 24)
    state.last_tokens.fill_(5)
    rows = [RoundRow(1, 0, [3], 0, [4], sampling), RoundRow(3, 9, [6, *drafts], len(drafts), [9], sampling, samples=samples)]
    uploads.send(rows, 0)
    ops.prepare(uploads.on_device, state, inputs, 16, SCRATCH)
    ops.accept(uploads.on_device, state, inputs, torch.tensor([4, *targets] + [-1] * (23 - len(targets)), device=DEVICE))
    assert inputs.results[0, :2].tolist() == [0, 4]
    assert inputs.results[1, : len(result)].tolist() == result
    assert state.last_tokens.tolist() == [5, 4, 5, last_token, 5, 5]
