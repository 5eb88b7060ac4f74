"""Rounds of few rows are packed in another way than larger ones: the same message, and the same that the host knows of it."""

import random

import pytest
import torch

from specwire.engine.graphs import upload
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow, Uploads
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

NUM_SLOTS, MAX_BLOCKS = 6, 12
LIMITS = RoundLimits(NUM_SLOTS, 3, 64, 16 * MAX_BLOCKS)
DEVICE = torch.device("cpu")
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=None),
    SamplingParams(temperature=0.7, max_tokens=None, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=None, bad_words_token_ids=((3, 4),)),
]


def sampling_of(number: int) -> SlotSampling:
    return SlotSampling(ASKED[number % len(ASKED)], key=number, vocab_size=61, token_ids=[5], num_prompt_tokens=1, device=DEVICE)


def random_row(rng: random.Random, slot: int, blocks: int) -> RoundRow:
    samples, from_device = rng.random() < 0.7, rng.random() < 0.3
    num_drafts = rng.randint(0, 3) if samples and not from_device else 0
    num_tokens = 1 if from_device else 1 + num_drafts + rng.randint(0, 4) * (rng.random() < 0.3)
    tokens = [rng.randrange(61) for _ in range(num_tokens)]
    return RoundRow(slot, rng.randint(0, 100), tokens, num_drafts, range(slot * 20, slot * 20 + blocks), sampling_of(slot), samples, from_device)


def test_few_rows_are_packed_like_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    few, many = (Uploads(LIMITS, MAX_BLOCKS, 1, DEVICE) for _ in range(2))
    blocks, asked = dict.fromkeys(range(NUM_SLOTS), 0), 0
    for number in range(200):
        for slot in rng.sample(range(NUM_SLOTS), rng.randint(0, 2)) if number else range(NUM_SLOTS):
            assert few.open(slot, sampling_of(slot + number)) == many.open(slot, sampling_of(slot + number))
            blocks[slot] = 0
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
        for slot in slots:
            blocks[slot] = min(blocks[slot] + rng.choice([0, 0, 1, 3]), MAX_BLOCKS)
        rows = [random_row(rng, slot, blocks[slot]) for slot in slots]
        sent = few.send(rows, 0)
        with monkeypatch.context() as patch:
            patch.setattr(upload, "_FEW_ROWS", 0)
            assert many.send(rows, 0) == sent
        assert torch.equal(few.on_device[: sent.size], many.on_device[: sent.size])
        asked += len(sent.on_host) + len(sent.reporting)
    assert asked > 50


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([RoundRow(0, 3, [5], 1, [1], sampling_of(0))], "bad rows"),
        ([RoundRow(0, -1, [5], 0, [1], sampling_of(0))], "bad rows"),
        ([RoundRow(0, 3, [5, 6], 0, [1], sampling_of(0), from_device=True)], "bad rows"),
        ([RoundRow(0, 3, [5, 6], 1, [1], sampling_of(0), samples=False)], "bad rows"),
        ([RoundRow(0, 3, [5], 0, [1], sampling_of(0))] * 2, "several rows of one slot"),
        ([RoundRow(0, 3, [5], 0, list(range(MAX_BLOCKS + 1)), sampling_of(0))], "the device has place for 12"),
    ],
)
def test_wrong_rows_are_named(rows: list[RoundRow], text: str) -> None:
    uploads = Uploads(LIMITS, MAX_BLOCKS, 1, DEVICE)
    with pytest.raises(AssertionError, match=text):
        uploads.send(rows, 0)
