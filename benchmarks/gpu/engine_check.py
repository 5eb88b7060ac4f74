"""Checks of the round runner on a GPU: graphs against the same kernels run one by one, and against the torch twins in float32."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.engine_models import SMALL, TINY
from benchmarks.gpu.sizes import BLOCK_SIZE
from specwire.engine.graphs.backends import Backend, TorchBackend
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.sampling.segments import SegmentTokens
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

_SENTINEL = 1234.0
_MAX_LOGPROB_ERROR = 1e-3
_SYNTHETIC_RATES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

Asks = Callable[[int], SamplingParams]
"""Draws what a sequence asks for, given the size of the vocabulary."""


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """How much is checked.

    Args:
        num_drafts: values of K that rounds draw from 0 to.
        num_rounds: of each K.
    """

    model: ModelConfig
    limits: RoundLimits
    num_drafts: tuple[int, ...]
    num_rounds: int

    @property
    def blocks_per_sequence(self) -> int:
        return self.limits.max_model_len // BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """One more than sequences own: the sentinel's."""
        return self.limits.max_num_seqs * self.blocks_per_sequence + 1


FULL = CheckSizes(SMALL, RoundLimits(24, 8, 2048, 512), tuple(range(9)), 14)
QUICK = CheckSizes(TINY, RoundLimits(6, 8, 512, 256), (0, 8), 10)
"""For the CPU, and for a memory checker, which makes everything a hundred times slower."""


def draw_plain(vocab_size: int) -> SamplingParams:
    """Greedy, or at a temperature."""
    return SamplingParams(temperature=random.choice([0.0, 0.7, 1.0]), max_tokens=None)


def draw_processed(vocab_size: int) -> SamplingParams:
    """Filters, processors and log-probabilities, several at a time."""
    asked: list[dict[str, Any]] = [
        {"top_k": random.choice([1, 5, 40])},
        {"top_p": random.choice([0.5, 0.9, 0.99])},
        {"min_p": random.choice([0.01, 0.2])},
        {"presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {"logit_bias": {random.randrange(vocab_size): random.uniform(-5, 8) for _ in range(5)}},
        {"allowed_token_ids": tuple(random.sample(range(vocab_size), vocab_size // 2))},
        {"bad_words_token_ids": tuple((token,) for token in random.sample(range(vocab_size), 20))},
        {"min_tokens": 20, "stop_token_ids": tuple(random.sample(range(vocab_size), 30))},
        {"logprobs": random.choice([0, 3])},
    ]
    chosen = {key: value for part in random.sample(asked, random.randint(1, 4)) for key, value in part.items()}
    return SamplingParams(**{"temperature": random.choice([0.0, 0.7, 1.0]), "max_tokens": None, **chosen})


@dataclass(slots=True)
class _Sequence:
    sampling: SlotSampling
    table: list[int]
    tokens: list[int]
    num_opened: int
    num_computed: int = 0
    future: list[int] = field(default_factory=list)

    @classmethod
    def random(cls, table: list[int], params: SamplingParams, vocab_size: int, device: torch.device, *, is_synthetic: bool) -> "_Sequence":
        prompt = [random.randrange(vocab_size) for _ in range(random.choice([2, 9, 40, 100]))]
        sampling = SlotSampling(
            params,
            key=random.getrandbits(64),
            vocab_size=vocab_size,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            synthetic_rates=_SYNTHETIC_RATES if is_synthetic else None,
            device=device,
        )
        return cls(sampling, table, prompt, len(prompt))


def check_graphs(
    device: str, sizes: CheckSizes, draw: Asks, *, is_synthetic: bool = False, backend: Callable[[Decoder], Backend | None] = lambda model: None
) -> Iterator[dict[str, Any]]:
    """A row for each K and kind of reference; raises where tokens differ or the sentinel changes.

    Args:
        draw: what the sequences ask for.
        is_synthetic: drafts are accepted by given rates.
        backend: makes the kernels that are checked; None: the device's.
    """
    for dtype, reference in ((torch.bfloat16, "the same kernels, eager"), (torch.float32, "torch twins")):
        model = dummy_model(sizes.model, dtype, device, std=0.05)
        twin = TorchBackend(model.config, model.device, dtype, BLOCK_SIZE) if dtype is torch.float32 else None
        caches = [_marked_cache(model, sizes) for _ in range(2)]
        ours = RoundRunner(model, caches[0], sizes.limits, num_in_flight=1, backend=backend(model))
        other = RoundRunner(model, caches[1], sizes.limits, num_in_flight=1, backend=twin or backend(model), use_graphs=False)
        ours.capture()
        other.capture()
        for num_drafts in sizes.num_drafts:
            rows = _Rows(sizes, draw, model.device, is_synthetic=is_synthetic)
            num_rows, num_different = rows.compare(ours, other, num_drafts)
            counted = {"rows": num_rows, "tokens": rows.num_tokens, "accepted": rows.num_accepted, "different": num_different}
            yield {"K": num_drafts, "reference": reference, **counted, "sampled_outside": ours.counts.num_rows_sampled_outside}
            # Twins sum in another order: a near tie may fall the other way.
            assert num_different <= (0 if twin is None else num_rows // 200 + 1), f"K = {num_drafts}: {num_different} of {num_rows} rows differ"
            assert num_drafts == 0 or rows.num_accepted > 0, "no draft was ever accepted"
        _check_sentinel(caches[0], sizes, "by a round")
        touched = _touch_all_sizes(ours, sizes)
        _check_sentinel(caches[0], sizes, "by padding")
        yield {"K": f"{touched} padded sizes", "reference": "sentinel in the last block", "different": 0}


def check_memory(device: str, sizes: CheckSizes) -> Iterator[dict[str, Any]]:
    """All kernels of random rounds one by one, without graphs, for a memory checker around this process."""
    for name, draw, is_synthetic in (("plain", draw_plain, False), ("processed", draw_processed, False), ("synthetic", draw_plain, True)):
        model = dummy_model(sizes.model, torch.bfloat16, device, std=0.05)
        runner = RoundRunner(model, _marked_cache(model, sizes), sizes.limits, num_in_flight=1, use_graphs=False)
        runner.capture()
        rows = _Rows(sizes, draw, model.device, is_synthetic=is_synthetic)
        num_rows, _ = rows.compare(runner, None, max(sizes.num_drafts))
        yield {"asks": name, "rows": num_rows, "tokens": rows.num_tokens, "accepted": rows.num_accepted}


class _Rows:
    """Random ragged rounds of random sequences."""

    def __init__(self, sizes: CheckSizes, draw: Asks, device: torch.device, *, is_synthetic: bool) -> None:
        self._sizes, self._draw, self._device, self._is_synthetic = sizes, draw, device, is_synthetic
        self._vocab_size = sizes.model.vocab_size
        self.num_tokens = self.num_accepted = 0

    def compare(self, ours: RoundRunner, other: RoundRunner | None, num_drafts: int) -> tuple[int, int]:
        """Runs them on both: (rows, rows that differ)."""
        num_slots, blocks = self._sizes.limits.max_num_seqs, self._sizes.blocks_per_sequence
        order = random.sample(range(self._sizes.num_blocks - 1), self._sizes.num_blocks - 1)
        sequences = {slot: self._sequence(order[slot * blocks :][:blocks]) for slot in range(num_slots)}
        self._look_ahead(ours, sequences)
        runners = [ours] if other is None else [ours, other]
        for runner in runners:
            for slot, sequence in sequences.items():
                runner.open(slot, sequence.sampling)
        num_rows = num_different = 0
        for _ in range(self._sizes.num_rounds):
            rows = [self._row(slot, sequences[slot], num_drafts) for slot in random.sample(sorted(sequences), random.randint(1, len(sequences)))]
            outputs, *others = [runner.launch(rows).results() for runner in runners]
            for row, mine, theirs in zip(rows, outputs, others[0] if others else outputs, strict=True):
                assert not mine.is_bad, row
                self._take(sequences[row.slot], row, mine)
                if _differ(mine, theirs):
                    num_different += 1
                    del sequences[row.slot]  # what the two devices' states hold of it is no longer the same
            num_rows += len(rows)
        return num_rows, num_different

    def _sequence(self, table: list[int]) -> _Sequence:
        return _Sequence.random(table, self._draw(self._vocab_size), self._vocab_size, self._device, is_synthetic=self._is_synthetic)

    def _take(self, sequence: _Sequence, row: RoundRow, out: SegmentTokens) -> None:
        sequence.num_computed += len(row.token_ids) - row.num_drafts + out.num_accepted
        sequence.tokens += out.token_ids
        sequence.sampling.append(out.token_ids)
        self.num_tokens += len(out.token_ids)
        self.num_accepted += out.num_accepted

    def _look_ahead(self, runner: RoundRunner, sequences: dict[int, _Sequence]) -> None:
        """Finds what each sequence will say, to draft from."""
        for slot, sequence in sequences.items():
            runner.open(slot, sequence.sampling)
            [out] = runner.launch([RoundRow(slot, 0, sequence.tokens, 0, sequence.table, sequence.sampling)]).results()
            sequence.future += out.token_ids
        for step in range(self._sizes.num_rounds * 4):
            rows = [RoundRow(slot, s.num_opened + step, [0], 0, s.table, s.sampling, from_device=True) for slot, s in sequences.items()]
            for sequence, out in zip(sequences.values(), runner.launch(rows).results(), strict=True):
                sequence.future += out.token_ids

    def _row(self, slot: int, sequence: _Sequence, num_drafts: int) -> RoundRow:
        known = sequence.tokens[sequence.num_computed :]
        if len(known) > 1 or not sequence.num_computed:
            known = known[: random.choice([5, 9, 70])]
            samples = sequence.num_computed + len(known) == len(sequence.tokens)
            return RoundRow(slot, sequence.num_computed, known, 0, sequence.table, sequence.sampling, samples=samples)
        num_emitted = len(sequence.tokens) - sequence.num_opened
        future = sequence.future[num_emitted:][: random.randint(0, num_drafts)]
        drafts = [token if random.random() < 0.85 else random.randrange(self._vocab_size) for token in future]
        ahead = not drafts and num_emitted > 0 and random.random() < 0.5
        return RoundRow(
            slot, sequence.num_computed, [0 if ahead else known[0], *drafts], len(drafts), sequence.table, sequence.sampling, from_device=ahead
        )


def _differ(mine: SegmentTokens, theirs: SegmentTokens) -> bool:
    """Other tokens, or other log-probabilities than rounding explains."""
    if (mine.num_accepted, mine.token_ids, mine.is_bad) != (theirs.num_accepted, theirs.token_ids, theirs.is_bad):
        return True
    pairs = zip(mine.logprobs or (), theirs.logprobs or (), strict=True)
    return any(abs(one.sampled - two.sampled) > _MAX_LOGPROB_ERROR for one, two in pairs)


def _marked_cache(model: Decoder, sizes: CheckSizes) -> KVCache:
    """A cache full of the sentinel."""
    cache = KVCache(model.config, sizes.num_blocks, model.dtype, model.device)
    for layer in cache.layers:
        layer.fill_(_SENTINEL)
    return cache


def _check_sentinel(cache: KVCache, sizes: CheckSizes, written: str) -> None:
    """Of the last block that sequences could own, but none does."""
    for layer in cache.layers:
        assert bool((layer[sizes.num_blocks - 1] == layer.new_tensor(_SENTINEL)).all()), f"the last block, which nobody owns, was written {written}"


def _touch_all_sizes(runner: RoundRunner, sizes: CheckSizes) -> int:
    """One token fewer than each size, so that each is padded; returns the number of sizes."""
    limits = sizes.limits
    for size in runner.graph_sizes:
        left, rows = max(size - 1, 1), []
        for slot in range(limits.max_num_seqs):
            count = min(left, limits.max_query_len)
            if count:
                params, vocab_size = SamplingParams(temperature=1.0), sizes.model.vocab_size
                sampling = SlotSampling(params, key=slot, vocab_size=vocab_size, token_ids=[1], num_prompt_tokens=1)
                runner.open(slot, sampling)
                rows.append(RoundRow(slot, 0, [7] * count, 0, [slot * sizes.blocks_per_sequence], sampling))
            left -= count
        runner.launch(rows).results()
    return len(runner.graph_sizes)
