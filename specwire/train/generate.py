"""The target's own answers, for many prompts at once: one static batch, padded at the left, shrunk as answers end."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from specwire.train.data import Job
from specwire.train.noise import Noise
from specwire.train.target import Target, causal_attention, free_bytes

_PREFILL_TOKENS = 65_536
_SHRINK_EVERY = 16
_SHRINK_BELOW = 0.8
"""Rows still running that make copying their KV worth it."""
_CPU_ROWS = 64


def max_rows(target: Target, num_tokens: int) -> int:
    """Sequences of num_tokens tokens that are generated at once: what half of a GPU's free memory holds."""
    if target.device.type != "cuda":
        return _CPU_ROWS
    config = target.config
    bytes_per_row = num_tokens * 2 * config.num_layers * config.num_kv_heads * config.head_dim * target.dtype.itemsize + 8 * config.vocab_size
    return max(1, int(free_bytes(target.device) * 0.5 / bytes_per_row))


def generate(
    target: Target,
    jobs: Sequence[Job],
    max_new: int,
    seed: int,
    on_token: Callable[[float], None] = lambda share: None,
    num_rows: int = 0,
    noise: Noise | None = None,
) -> list[np.ndarray]:
    """The answer to each job, at most max_new tokens, EOS included.

    Args:
        noise: of the jobs, instead of the seed's; its temperatures count.
        on_token: called before each step with the share of all steps that is done, at least; it may raise to stop.
        num_rows: at once; 0 = `max_rows`.
    """
    num_rows = num_rows or max_rows(target, max(len(job.prompt) for job in jobs) + max_new)
    answers: list[np.ndarray] = []
    for first in range(0, len(jobs), num_rows):
        generator = torch.Generator(target.device).manual_seed(seed * 1_000_003 + first)
        rows = slice(first, first + num_rows)
        batch = _Batch(target, jobs[rows], max_new, generator, noise and Noise(noise.temperatures[rows], noise.keys[rows]))
        answers += batch.run(partial(_pass_on, on_token, first / len(jobs), min(num_rows, len(jobs) - first) / len(jobs)))
    return answers


def _pass_on(on_token: Callable[[float], None], start: float, size: float, share: float) -> None:
    on_token(start + size * share)


class _Batch:
    """Rows whose prompts end at the same column, so that all write their KV at the same one."""

    def __init__(self, target: Target, jobs: Sequence[Job], max_new: int, generator: torch.Generator, noise: Noise | None) -> None:
        config, device = target.config, target.device
        self._target, self._generator, self._max_new, self._noise = target, generator, max_new, noise
        self._width = max(len(job.prompt) for job in jobs)
        tokens = np.zeros((len(jobs), self._width), dtype=np.int64)
        for row, job in enumerate(jobs):
            tokens[row, self._width - len(job.prompt) :] = job.prompt
        self._prompts = torch.from_numpy(tokens).to(device)
        self._padding = torch.tensor([self._width - len(job.prompt) for job in jobs], device=device)  # [B]
        self._temperatures = torch.tensor([job.temperature for job in jobs], device=device)[:, None]  # [B, 1]
        self._eos = torch.tensor(config.eos_token_ids or (-1,), device=device)
        shape = (len(jobs), config.num_kv_heads, self._width + max_new, config.head_dim)
        self._keys = [torch.empty(shape, dtype=target.dtype, device=device) for _ in range(config.num_layers)]
        self._values = [torch.empty(shape, dtype=target.dtype, device=device) for _ in range(config.num_layers)]
        self._rows = torch.arange(len(jobs), device=device)  # of the answers that still run
        self._answers = torch.full((len(jobs), max_new), -1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def run(self, on_token: Callable[[float], None]) -> list[np.ndarray]:
        last = self._sample(self._prefill(), 0)
        is_done = torch.isin(last, self._eos)
        self._answers[:, 0] = last
        for count in range(1, self._max_new):
            on_token(count / self._max_new)
            if count % _SHRINK_EVERY == 0:
                is_running = ~is_done
                num_running = int(is_running.sum())
                if num_running == 0:
                    break
                if num_running < _SHRINK_BELOW * len(is_done):
                    last, is_done = last[is_running], is_done[is_running]
                    self._keep(is_running)
            last = self._sample(self._step(last, self._width + count - 1), count)
            self._answers[self._rows, count] = torch.where(is_done, -1, last)
            is_done |= torch.isin(last, self._eos)
        return [row[row >= 0] for row in self._answers.cpu().numpy()]

    def _prefill(self) -> torch.Tensor:
        """Writes the prompts' KV; returns final hidden states of their last tokens [B, hidden_size]."""
        columns = torch.arange(self._width, device=self._prompts.device)
        last = []
        rows_at_once = max(1, _PREFILL_TOKENS // self._width)
        for first in range(0, len(self._prompts), rows_at_once):
            rows = slice(first, first + rows_at_once)
            padding = self._padding[rows, None]
            # Padding attends to itself: a row of attention without a key is not a number.
            visible = (columns[None, :, None] >= columns[None, None, :]) & (columns >= padding)[:, None, :] | torch.eye(
                self._width, dtype=torch.bool, device=columns.device
            )

            def attend(
                layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: slice = rows, visible: torch.Tensor = visible
            ) -> torch.Tensor:
                self._keys[layer][rows, :, : self._width], self._values[layer][rows, :, : self._width] = key, value
                return causal_attention(query, key, value, visible[:, None])

            last.append(self._target.forward(self._prompts[rows], (columns - padding).clamp_min(0), attend).final[:, -1])
        return torch.cat(last)

    def _step(self, last: torch.Tensor, column: int) -> torch.Tensor:
        """One token more of each row, written at a column; returns its final hidden states [B, hidden_size]."""
        config = self._target.config
        grouped = (len(last), config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        is_hidden = (torch.arange(column + 1, device=last.device) < self._padding[:, None])[:, None, None]  # [B, 1, 1, column + 1]

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self._keys[layer][:, :, column], self._values[layer][:, :, column] = key[:, :, 0], value[:, :, 0]
            keys, values = self._keys[layer][:, :, : column + 1], self._values[layer][:, :, : column + 1]
            scores = (query.reshape(grouped) @ keys.transpose(-1, -2)).float() * config.head_dim**-0.5
            probs = scores.masked_fill_(is_hidden, -math.inf).softmax(-1).to(values.dtype)
            return (probs @ values).view_as(query)

        return self._target.forward(last[:, None], (column - self._padding)[:, None], attend).final[:, 0]

    def _sample(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """Token number `count` of the answers by Gumbel-max: the argmax of logits + temperature x noise."""
        logits = self._target.logits(hidden)
        if self._noise is not None:
            return self._noise.choose(logits, self._rows, self._width - self._padding + count)
        noise = torch.empty_like(logits).exponential_(generator=self._generator).log_()
        return (logits - self._temperatures * noise).argmax(-1)

    def _keep(self, is_running: torch.Tensor) -> None:
        self._rows, self._padding, self._temperatures = self._rows[is_running], self._padding[is_running], self._temperatures[is_running]
        for caches in (self._keys, self._values):
            for layer, cache in enumerate(caches):
                caches[layer] = cache[is_running]
