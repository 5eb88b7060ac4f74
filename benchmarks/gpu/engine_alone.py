"""The engine without services: a dummy model behind a round runner, given the rounds that a step loop would give it."""

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.sizes import BLOCK_SIZE, Sizes
from specwire.engine.graphs.results import Round
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import dummy_model
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams


class Engine:
    """Room for as many sequences as the sizes have; slot i owns a fixed row of blocks.

    Args:
        config: shape of the model.
        sizes: of the batches.
        device: cuda, in bfloat16, or cpu, in float32.
    """

    def __init__(self, config: ModelConfig, sizes: Sizes, device: str = "cuda") -> None:
        started = time.perf_counter()
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        self._sizes, self._device = sizes, device
        self.model = dummy_model(config, dtype, device)
        num_seqs, blocks = sizes.max_num_seqs, sizes.num_blocks
        self.tables: list[list[int]] = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).tolist()
        cache = KVCache(config, num_seqs * blocks, dtype, device)
        self.synchronize()
        loaded = time.perf_counter()
        limits = RoundLimits(num_seqs, sizes.num_draft_tokens, sizes.max_num_batched_tokens, sizes.max_model_len)
        self.runner = RoundRunner(self.model, cache, limits)
        self.runner.capture()
        self.synchronize()
        self.load_s, self.capture_s = loaded - started, time.perf_counter() - loaded
        params = SamplingParams(temperature=0.0, max_tokens=None)
        self.sampling = SlotSampling(params, key=1, vocab_size=config.vocab_size, token_ids=[0], num_prompt_tokens=1, device=self.model.device)

    def synchronize(self) -> None:
        """Returns when the device has nothing left to do."""
        if self._device != "cpu":
            torch.cuda.synchronize()

    def prefill(self, count: int) -> float:
        """Seconds from the first launch until the first tokens of `count` new prompts are on the host."""
        length, most = self._sizes.num_prompt_tokens, self._sizes.max_num_batched_tokens
        prompts = torch.randint(3, self.model.config.vocab_size, (count, length)).tolist()
        self.reopen(count)
        self.synchronize()
        started = time.perf_counter()
        step = max(1, most // length)
        chunks = [range(begin, min(begin + step, count)) for begin in range(0, count, step)]
        self._run([RoundRow(slot, 0, prompts[slot], 0, self._table(slot, length), self.sampling) for slot in chunk] for chunk in chunks)
        return time.perf_counter() - started

    def reopen(self, count: int) -> None:
        """Back to the end of the prompts of the last prefill: `decode` can be repeated."""
        for slot in range(count):
            self.runner.open(slot, self.sampling)

    def decode(self, count: int) -> float:
        """Seconds of the steps behind a prefill, two in flight, each from tokens that only the device has."""
        first = self._sizes.num_prompt_tokens
        self.synchronize()
        started = time.perf_counter()
        self._run(self.decode_rows(count, position) for position in range(first, first + self._sizes.num_steps))
        return time.perf_counter() - started

    def decode_rows(self, count: int, position: int) -> list[RoundRow]:
        """One step of all sequences."""
        return [RoundRow(slot, position, (0,), 0, self._table(slot, position + 1), self.sampling, from_device=True) for slot in range(count)]

    def launch_ms(self, count: int) -> float:
        """Host time of launching a step: median of ten."""
        self.prefill(count)
        rows = self.decode_rows(count, self._sizes.num_prompt_tokens)
        self.runner.launch(rows).results()
        times = []
        for _ in range(10):
            started = time.perf_counter()
            launched = self.runner.launch(rows)
            times.append(time.perf_counter() - started)
            launched.results()
        return sorted(times)[5] * 1e3

    def _table(self, slot: int, num_tokens: int) -> list[int]:
        return self.tables[slot][: -(-num_tokens // BLOCK_SIZE)]

    def _run(self, rounds: Iterator[list[RoundRow]]) -> None:
        before: Round | None = None
        for rows in rounds:
            launched = self.runner.launch(rows)
            if before is not None:
                _check(before)
            before = launched
        assert before is not None, "no round was given"
        _check(before)


def _check(launched: Round) -> None:
    results = launched.results()
    assert all(not row.is_bad and len(row.token_ids) == 1 for row in results), results
