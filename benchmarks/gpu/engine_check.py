"""Checks of the round runner on a GPU: graphs against the same kernels run one by one, and against the torch twins in float32."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.engine_models import SMALL, dummy_on_device
from specwire.engine.graphs.backends import TorchBackend
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

_LIMITS = RoundLimits(max_num_seqs=24, max_num_draft_tokens=8, max_num_batched_tokens=2048, max_model_len=512)
_BLOCKS = 32  # of a sequence
_NUM_BLOCKS = _LIMITS.max_num_seqs * _BLOCKS + 1
_ROUNDS = 14
_SENTINEL = 1234.0


@dataclass(slots=True)
class _Sequence:
    sampling: SlotSampling
    table: list[int]
    tokens: list[int]
    num_opened: int
    num_computed: int = 0
    future: list[int] = field(default_factory=list)

    @classmethod
    def random(cls, table: list[int]) -> "_Sequence":
        params = SamplingParams(temperature=random.choice([0.0, 0.7, 1.0]), max_tokens=None)
        prompt = [random.randrange(SMALL.vocab_size) for _ in range(random.choice([2, 9, 40, 130]))]
        key = random.getrandbits(64)
        sampling = SlotSampling(params, key=key, vocab_size=SMALL.vocab_size, token_ids=prompt, num_prompt_tokens=len(prompt))
        return cls(sampling, table, prompt, len(prompt))


def check_graphs() -> Iterator[dict[str, Any]]:
    """A row for each K and kind of reference; raises where tokens differ or the sentinel changes."""
    for dtype, reference in ((torch.bfloat16, "the same kernels, eager"), (torch.float32, "torch twins")):
        model = dummy_on_device(SMALL, dtype, std=0.05)
        twin = TorchBackend(model.config, model.device, dtype, 16) if dtype is torch.float32 else None
        caches = [KVCache(model.config, _NUM_BLOCKS, dtype, "cuda") for _ in range(2)]
        for cache in caches:
            for layer in cache.layers:
                layer.fill_(_SENTINEL)
        ours = RoundRunner(model, caches[0], _LIMITS, num_in_flight=1)
        other = RoundRunner(model, caches[1], _LIMITS, num_in_flight=1, backend=twin, use_graphs=False)
        ours.capture()
        other.capture()
        for num_drafts in range(_LIMITS.max_num_draft_tokens + 1):
            num_tokens, num_accepted, num_rows, num_different = _compare(ours, other, num_drafts)
            yield {
                "K": num_drafts,
                "reference": reference,
                "rows": num_rows,
                "tokens": num_tokens,
                "accepted": num_accepted,
                "different": num_different,
            }
            # Twins sum in another order: a near tie may fall the other way.
            assert num_different <= (0 if twin is None else num_rows // 200), (
                f"K = {num_drafts}: {num_different} of {num_rows} rows differ from {reference}"
            )
            assert num_drafts == 0 or num_accepted > 0, "no draft was ever accepted"
        for layer in caches[0].layers:
            assert bool((layer[_NUM_BLOCKS - 1] == _SENTINEL).all()), "the last block that nobody owns was written"
        sizes = _touch_all_sizes(ours)
        for layer in caches[0].layers:
            assert bool((layer[_NUM_BLOCKS - 1] == _SENTINEL).all()), "padding wrote to the last block that nobody owns"
        yield {"K": f"{sizes} padded sizes", "reference": "sentinel in the last block", "different": 0}


def _compare(ours: RoundRunner, other: RoundRunner, num_drafts: int) -> tuple[int, int, int, int]:
    """Random ragged rounds on both: (tokens, accepted drafts, rows, rows that differ)."""
    order = random.sample(range(_NUM_BLOCKS - 1), _NUM_BLOCKS - 1)
    sequences = {slot: _Sequence.random(order[slot * _BLOCKS :][:_BLOCKS]) for slot in range(_LIMITS.max_num_seqs)}
    _look_ahead(ours, sequences)
    for runner in (ours, other):
        for slot, sequence in sequences.items():
            runner.open(slot, sequence.sampling)
    num_tokens = num_accepted = num_rows = num_different = 0
    for _ in range(_ROUNDS):
        rows = [_row(slot, sequences[slot], num_drafts) for slot in random.sample(sorted(sequences), random.randint(1, len(sequences)))]
        outputs = ours.launch(rows).results()
        num_different += sum(a != b for a, b in zip(outputs, other.launch(rows).results(), strict=True))
        for row, out in zip(rows, outputs, strict=True):
            assert not out.is_bad, row
            sequence = sequences[row.slot]
            sequence.num_computed += len(row.token_ids) - row.num_drafts + out.num_accepted
            sequence.tokens += out.token_ids
            num_tokens += len(out.token_ids)
            num_accepted += out.num_accepted
        num_rows += len(rows)
    return num_tokens, num_accepted, num_rows, num_different


def _look_ahead(runner: RoundRunner, sequences: dict[int, _Sequence]) -> None:
    """Finds what each sequence will say, to draft from."""
    for slot, sequence in sequences.items():
        runner.open(slot, sequence.sampling)
        [out] = runner.launch([RoundRow(slot, 0, sequence.tokens, 0, sequence.table, sequence.sampling)]).results()
        sequence.future += out.token_ids
    for step in range(_ROUNDS * 4):
        rows = [RoundRow(slot, s.num_opened + step, [0], 0, s.table, s.sampling, from_device=True) for slot, s in sequences.items()]
        for sequence, out in zip(sequences.values(), runner.launch(rows).results(), strict=True):
            sequence.future += out.token_ids


def _row(slot: int, sequence: _Sequence, num_drafts: int) -> RoundRow:
    known = sequence.tokens[sequence.num_computed :]
    if len(known) > 1 or not sequence.num_computed:
        known = known[: random.choice([5, 9, 70])]
        samples = sequence.num_computed + len(known) == len(sequence.tokens)
        return RoundRow(slot, sequence.num_computed, known, 0, sequence.table, sequence.sampling, samples=samples)
    num_emitted = len(sequence.tokens) - sequence.num_opened
    future = sequence.future[num_emitted:][: random.randint(0, num_drafts)]
    drafts = [token if random.random() < 0.85 else random.randrange(SMALL.vocab_size) for token in future]
    ahead = not drafts and num_emitted > 0 and random.random() < 0.5
    return RoundRow(
        slot, sequence.num_computed, [0 if ahead else known[0], *drafts], len(drafts), sequence.table, sequence.sampling, from_device=ahead
    )


def _touch_all_sizes(runner: RoundRunner) -> int:
    """One token fewer than each size, so that each is padded; returns the number of sizes."""
    for size in runner.graph_sizes:
        left, rows = max(size - 1, 1), []
        for slot in range(_LIMITS.max_num_seqs):
            count = min(left, _LIMITS.max_query_len)
            if count:
                sampling = SlotSampling(SamplingParams(temperature=1.0), key=slot, vocab_size=SMALL.vocab_size, token_ids=[1], num_prompt_tokens=1)
                runner.open(slot, sampling)
                table = [slot * _BLOCKS]
                rows.append(RoundRow(slot, 0, [7] * count, 0, table, sampling))
            left -= count
        runner.launch(rows).results()
    return len(runner.graph_sizes)
