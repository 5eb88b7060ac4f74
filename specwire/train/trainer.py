"""The training loop: AdamW with warm-up and a cosine, checkpoints, and the curve of what it sees."""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specwire.errors import FailedPreconditionError
from specwire.train.batches import BatchSource, plan_batches
from specwire.train.deadline import Deadline, TimeUp
from specwire.train.heads import Head
from specwire.train.loss import vocabulary_loss
from specwire.train.recipe import Recipe
from specwire.train.target import Target
from specwire.train.terms import LossShape

_NOTE_EVERY = 20
_SAVE_EVERY = 500
_NUM_HELD_OUT_CHECKS = 10
_HELD_OUT_BATCHES = 4

OnStep = Callable[[float, float, str], None]
"""Called with (done, total, what to show)."""


class Trainer:
    """Trains one head. Start it again with the same file to go on.

    Args:
        recipe: how.
        head: the module; also a `Head`.
        target: whose distribution it learns.
        source: of batches.
        draft_ids: [draft_vocab_size] ids that can be drafted; None = all.
        checkpoint: file for weights, optimizer and curve.
    """

    def __init__(
        self, recipe: Recipe, head: torch.nn.Module, target: Target, source: BatchSource, draft_ids: torch.Tensor | None, checkpoint: Path
    ) -> None:
        assert isinstance(head, Head), f"{type(head).__name__} lacks a part of the head's protocol"
        self._recipe, self._module, self._head, self._target, self._source = recipe, head, head, target, source
        self._draft_ids, self._checkpoint = draft_ids, checkpoint
        self._shape = LossShape(recipe.kl_weight, recipe.tv_weight, recipe.base_weight, recipe.temperature)
        rows = np.flatnonzero(~source.sequences.is_held_out)
        kept = np.random.default_rng([recipe.seed, 2]).permutation(rows)[: max(1, round(len(rows) * recipe.train_share))]
        self._rows, self._held_out = np.sort(kept), np.flatnonzero(source.sequences.is_held_out)
        decayed = [parameter for parameter in head.parameters() if parameter.ndim > 1]
        plain = [parameter for parameter in head.parameters() if parameter.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            fused=target.device.type == "cuda",
        )
        self._generator = torch.Generator(target.device).manual_seed(recipe.seed)
        self._step, self._seconds = 0, 0.0
        self.curve: list[dict[str, Any]] = []

    @property
    def progress(self) -> float:
        """From 0 to 1, when the training is over."""
        by_time = self._seconds / self._recipe.train_seconds if self._recipe.train_seconds else 0.0
        return min(1.0, max(self._step / self._recipe.num_steps, by_time))

    @property
    def num_steps(self) -> int:
        """Made so far."""
        return self._step

    @property
    def seconds(self) -> float:
        """That training took so far."""
        return self._seconds

    def run(self, deadline: Deadline, on_step: OnStep) -> None:
        """Trains to the end.

        Raises:
            TimeUp: the deadline came first; the checkpoint is written.
            FailedPreconditionError: the loss is no number any more; the checkpoint is of before.
        """
        if self._checkpoint.is_file():
            self._load()
        elif self._step == 0:
            self._head.start(self._source.batch(self._rows[np.linspace(0, len(self._rows) - 1, min(32, len(self._rows))).astype(int)]))
        sums = _Sums(self._recipe.num_draft_tokens, self._target.device)
        checks = iter(np.linspace(0, 1, _NUM_HELD_OUT_CHECKS + 1)[1:].tolist())
        next_check = next((share for share in checks if share > self.progress), 1.0)
        batches = self._batches()
        last_time = time.monotonic()
        while self.progress < 1:
            if deadline.is_over:
                self._save()
                raise TimeUp
            self._train_on(next(batches), sums)
            if self._step % _NOTE_EVERY == 0 or self.progress >= 1:
                values = sums.take()
                self._check_loss(values["loss"])
                now = time.monotonic()
                self._seconds, last_time = self._seconds + now - last_time, now
                self.curve.append({"step": self._step, "seconds": round(self._seconds, 2), **values})
                on_step(self.progress, 1.0, f"step {self._step}, loss {values['loss']:.3f}, overlap {values['overlap'][0]:.3f}")
                if self.progress >= next_check:
                    next_check = next(checks, 1.0)
                    self.curve[-1]["held_out"] = self._check_held_out()
                    last_time = time.monotonic()
            if self._step % _SAVE_EVERY == 0:
                self._save()
        self._save()

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FailedPreconditionError(
                f"the loss is {loss} by step {self._step}: training has diverged; lower the learning rate from {self._recipe.learning_rate:g}, "
                "into another --output"
            )

    def _train_on(self, rows: np.ndarray, sums: "_Sums") -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        loss = self._loss(rows, sums, self._generator)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._recipe.clip_norm)
        self._optimizer.step()
        self._step += 1

    def _loss(self, rows: np.ndarray, sums: "_Sums", generator: torch.Generator) -> torch.Tensor:
        target = self._target
        batch = self._source.batch(rows)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            pairs = self._head.pairs(batch, generator)
        loss, statistics = vocabulary_loss(
            pairs.hidden,
            pairs.weights,
            batch.final.flatten(0, 1)[pairs.rows],
            target.head,
            self._shape,
            draft_ids=self._draft_ids,
            previous=pairs.previous,
            bias_head=self._head.bias_head,
        )
        sums.add(loss.detach(), pairs.weights > 0, pairs.positions, statistics.overlap, statistics.is_top)
        return loss

    @torch.no_grad()
    def _check_held_out(self) -> dict[str, Any]:
        sums = _Sums(self._recipe.num_draft_tokens, self._target.device)
        batches = plan_batches(
            self._source.sequences.lengths[self._held_out], self._recipe.tokens_per_step, self._source.pad_to, np.random.default_rng(0)
        )
        for rows in batches[:_HELD_OUT_BATCHES]:
            self._loss(self._held_out[rows], sums, torch.Generator(self._target.device).manual_seed(0))
        return sums.take()

    def _rate(self) -> float:
        warm = min(1.0, (self._step + 1) / max(1, self._recipe.warmup_steps))
        return self._recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * self.progress))

    def _batches(self) -> Iterator[np.ndarray]:
        """From where the last run stopped on: what is trained on does not depend on how often it was interrupted."""
        epoch, num_skipped = 0, self._step
        lengths = self._source.sequences.lengths[self._rows]
        while True:
            plan = plan_batches(lengths, self._recipe.tokens_per_step, self._source.pad_to, np.random.default_rng([self._recipe.seed, 3, epoch]))
            for rows in plan[num_skipped:]:
                yield self._rows[rows]
            num_skipped = max(0, num_skipped - len(plan))
            epoch += 1

    def _save(self) -> None:
        scratch = self._checkpoint.with_suffix(".tmp")
        torch.save(
            {
                "head": self._module.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "generator": self._generator.get_state(),
                "step": self._step,
                "seconds": self._seconds,
                "curve": self.curve,
            },
            scratch,
        )
        os.replace(scratch, self._checkpoint)

    def _load(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._target.device, weights_only=True)
        self._module.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"].cpu())
        self._step, self._seconds, self.curve = state["step"], state["seconds"], state["curve"]


class _Sums:
    """Sums over drafts by position, kept on the device until they are asked for."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self._sums = torch.zeros((num_positions, 3), device=device)  # drafts, overlap, most likely tokens that agree
        self._loss = torch.zeros(2, device=device)  # sum, batches

    def add(self, loss: torch.Tensor, is_draft: torch.Tensor, positions: torch.Tensor, overlap: torch.Tensor, is_top: torch.Tensor) -> None:
        # No boolean index: it would wait for the device.
        values = torch.stack((torch.ones_like(overlap), overlap, is_top.float()), -1) * is_draft[..., None]
        self._sums.index_add_(0, positions.flatten(), values.flatten(0, 1))
        self._loss += torch.stack((loss, torch.ones_like(loss)))

    def take(self) -> dict[str, Any]:
        sums, (loss, count) = self._sums.clone().cpu().numpy(), self._loss.tolist()
        self._sums.zero_()
        self._loss.zero_()
        shares = sums[:, 1:] / np.maximum(sums[:, :1], 1)
        return {"loss": loss / max(count, 1), "overlap": shares[:, 0].round(4).tolist(), "top": shares[:, 1].round(4).tolist()}
