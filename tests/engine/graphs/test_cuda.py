"""Rounds and drafting on a CUDA device: the smallest and oddest sizes, nothing that waits, nothing that is compiled late."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton

from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams
from tests.engine.graphs.mixes import ALL, MIXES
from tests.engine.graphs.pair import Pair, spoilt
from tests.verifier.harness import EOS, GREEDY, tiny_config

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SIZES = {
    "one row without drafts": (RoundLimits(1, 0, 40, 96), {}),
    "one row, one draft": (RoundLimits(1, 1, 40, 96), {}),
    "no drafts": (RoundLimits(3, 0, 40, 96), {"vocab_size": 4099}),
    "chunks shorter than a batch's drafts": (RoundLimits(5, 4, 16, 96), {}),
    "groups of 3 and an odd vocabulary": (RoundLimits(3, 3, 64, 96), {"num_heads": 3, "num_kv_heads": 1, "vocab_size": 4099}),
    "groups of 8, head dimension 128": (RoundLimits(3, 3, 64, 96), {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}),
    "no groups": (RoundLimits(3, 2, 64, 96), {"num_heads": 2, "num_kv_heads": 2}),
}


@DEVICES
@pytest.mark.parametrize("name", SIZES)
def test_rounds_of_any_size_equal_the_verifier(device: str, name: str) -> None:
    limits, changes = SIZES[name]
    shape: dict = {"head_dim": 64} | changes
    pair = Pair(dummy_model(tiny_config(**shape), torch.float32, device, std=0.4), num_blocks=40, limits=limits)
    pair.runner.capture()
    params = [ALL, GREEDY, SamplingParams(temperature=0.8, max_tokens=None), *MIXES[2:4]][: limits.max_num_seqs]
    for slot, wanted in enumerate(params):
        pair.open(slot, [5, 6, 7 + slot] * 5, wanted, key=slot)
        for budget in (3, 9, 9):
            pair.launch({slot: budget})
    rng = random.Random(len(name))
    for number in range(12):
        room = limits.max_num_batched_tokens - len(params)
        work = {}
        for slot in range(len(params)):
            num_drafts = min(rng.randint(0, limits.max_num_draft_tokens) * (number % 3 > 0), room)
            room -= num_drafts
            work[slot] = spoilt([9] * num_drafts, rng, 61)
        pair.launch(work)
    pair.finish()
    assert pair.num_run_ahead > 0


def make_rounds(model: Decoder, num_drafts: int) -> RoundRunner:
    """Captured."""
    runner = RoundRunner(model, KVCache(model.config, 64, model.dtype, model.device), RoundLimits(8, num_drafts, 256, 128))
    runner.capture()
    return runner


def sampling_of(params: SamplingParams, prompt: list[int]) -> SlotSampling:
    return SlotSampling(params, key=3, vocab_size=61, token_ids=prompt, num_prompt_tokens=len(prompt), eos_token_ids=(EOS,))


def run_rounds(runner: RoundRunner, num_slots: int) -> None:
    """Prompts, one round in a graph and one kernel by kernel; then, each launched before the one ahead of it is read, decoding and drafts."""
    prompts = [[5, 6, 7, 8 + slot] * (1 + 4 * (slot % 3)) for slot in range(num_slots)]
    rows = []
    for slot, prompt in enumerate(prompts):
        sampling = sampling_of(MIXES[slot % len(MIXES)], prompt)
        runner.open(slot, sampling)
        blocks = range(8 * slot, 8 * slot + 8)
        rows.append(RoundRow(slot, 0, prompt, 0, blocks, sampling))
    rounds = [runner.launch(rows)]
    for number in range(6):
        num_drafts = 0 if number < 5 else 3
        rows = [
            row._replace(start_position=len(prompt) + number, token_ids=[9] * (1 + num_drafts), num_drafts=num_drafts, from_device=not num_drafts)
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        rounds.append(runner.launch(rows))
        rounds.pop(0).results()
    rounds.pop().results()


def make_drafts(model: Decoder, num_drafts: int) -> DraftRunner:
    runner = DraftRunner(
        model, KVCache(model.config, 64, model.dtype, model.device), max_num_seqs=8, max_num_drafts=num_drafts, max_model_len=128, max_chunk=64
    )
    runner.capture()
    return runner


def run_drafts(runner: DraftRunner, num_slots: int) -> None:
    """Prompts longer than a graph takes, then calls for a token each."""
    for slot in range(num_slots):
        runner.open(slot, DraftSampling(slot % 2, 3, 0))
    tables = [range(8 * slot, 8 * slot + 8) for slot in range(num_slots)]
    runner.launch([DraftRow(slot, 0, [5, 6, 7] * (1 + slot), tables[slot], 1 + slot % 3) for slot in range(num_slots)])()
    for number in range(3):
        runner.launch([DraftRow(slot, 3 * (1 + slot) + number, [9], tables[slot], 1 + (slot + number) % 3) for slot in range(num_slots)])()


@contextmanager
def compiled() -> Iterator[list[dict]]:
    """The kernels that Triton compiles, or loads from its cache, inside."""
    found: list[dict] = []
    triton.knobs.compilation.listener = lambda **event: found.append(event)
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = None


@DEVICES
def test_nothing_is_compiled_after_the_capture(device: str) -> None:
    model = dummy_model(tiny_config(head_dim=64), torch.bfloat16, device, std=0.4)
    with compiled() as at_start:
        rounds, drafts = make_rounds(model, 6), make_drafts(model, 6)  # no other test's number: its kernels would be there already
    assert bool(at_start) == (device == "cuda")
    with compiled() as late:
        for num_slots in range(1, 9):
            run_rounds(rounds, num_slots)
            run_drafts(drafts, num_slots)
    assert not late, [event["src"].name for event in late]
    assert rounds.counts.num_eager_rounds > 0
    assert rounds.counts.num_graph_rounds > 40
    assert drafts.counts.num_eager_passes > 0


@DEVICES
def test_neither_an_open_nor_a_launch_waits_for_the_device(device: str) -> None:
    """On CUDA torch raises where it would; results come from an event, which does not count."""
    model = dummy_model(tiny_config(head_dim=64), torch.bfloat16, device, std=0.4)
    rounds, drafts = make_rounds(model, 3), make_drafts(model, 3)
    mode = torch.cuda.get_sync_debug_mode() if device == "cuda" else None
    if mode is not None:
        with warnings.catch_warnings(action="ignore"):  # that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
    try:
        run_rounds(rounds, 8)
        run_drafts(drafts, 8)
    finally:
        if mode is not None:
            torch.cuda.set_sync_debug_mode(mode)
    assert rounds.counts.num_rows_sampled_outside == 0
