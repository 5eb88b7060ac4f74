"""What a head's scores are worth where requests sample: target and drafts share their noise, so acceptance depends on the temperature."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.train.batches import BatchSource, plan_batches
from specwire.train.calibration import area_under_curve, calibration_error, sigmoid
from specwire.train.data import Job, Sequences
from specwire.train.deadline import Deadline
from specwire.train.evaluate import TOKENS_AT_ONCE, fit_positions, num_accepted, observe, walk
from specwire.train.generate import generate
from specwire.train.heads import Head
from specwire.train.noise import Noise
from specwire.train.target import Target

_MOST_PROMPTS = 256
_FIRST_KEY, _KEY_STEP = 1, 7919
_MIN_DRAFTS = 1000
"""With fewer there is no fit for the temperature."""


@dataclass(frozen=True, slots=True)
class SampledFit:
    """Of answers at one temperature, generated and drafted with the same noise.

    Args:
        weights_by_position: (a, b, c) of P(accepted, if all before are) = sigmoid(a ln p - b ln(1 - p) + c), p the draft's probability at the
            temperature.
        num_drafts, calibration_error, area_under_curve: of the answers that it was not fitted on.
    """

    temperature: float
    weights_by_position: list[list[float]]
    num_drafts: int
    calibration_error: float | None
    area_under_curve: float | None


def fit_sampled(
    head: Head,
    target: Target,
    jobs: Sequence[Job],
    layers: tuple[int, ...],
    num_drafts: int,
    max_new: int,
    temperatures: Sequence[float],
    deadline: Deadline,
) -> list[SampledFit]:
    """Answers held-out prompts at each temperature and fits one half of the answers; temperatures with too few drafts are left out.

    Args:
        jobs: of which the held-out ones count.
        layers: whose hidden states the head reads.
        max_new: most tokens of an answer.

    Raises:
        TimeUp: the deadline came first.
    """
    prompts = sorted({tuple(job.prompt) for job in jobs if job.is_held_out})
    order = np.random.default_rng(0).permutation(len(prompts))[:_MOST_PROMPTS]
    asked = [Job(list(prompts[index]), temperature, is_held_out=True) for temperature in temperatures for index in order]
    device = target.device
    noise = Noise(
        torch.tensor([job.temperature for job in asked], dtype=torch.float32, device=device),
        torch.arange(len(asked), dtype=torch.int64, device=device) * _KEY_STEP + _FIRST_KEY,
    )
    answers = generate(target, asked, max_new, 0, lambda share: deadline.check(), noise=noise)
    found = _observations(head, target, _joined(asked, answers), noise, layers, deadline)
    fits = []
    for number, temperature in enumerate(temperatures):
        here = found[found[:, 0] // len(order) == number]
        if len(here) >= _MIN_DRAFTS:
            fits.append(_fit(here, temperature, num_drafts))
    return fits


def _joined(jobs: Sequence[Job], answers: Sequence[np.ndarray]) -> Sequences:
    parts = [np.concatenate((np.array(job.prompt), answer)).astype(np.int32) for job, answer in zip(jobs, answers, strict=True)]
    return Sequences(
        tokens=np.concatenate(parts),
        starts=np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64),
        prompt_lens=np.array([len(job.prompt) for job in jobs], dtype=np.int64),
        is_greedy=np.zeros(len(jobs), dtype=bool),
        is_held_out=np.ones(len(jobs), dtype=bool),
        num_loops=0,
    )


def _observations(head: Head, target: Target, sequences: Sequences, noise: Noise, layers: tuple[int, ...], deadline: Deadline) -> np.ndarray:
    """[N, 6], see `specwire.train.evaluate.observe`."""
    source = BatchSource(target, sequences, layers)
    observations = [np.zeros((0, 6))]
    for rows in plan_batches(sequences.lengths, TOKENS_AT_ONCE, source.pad_to, np.random.default_rng(0)):
        deadline.check()
        batch, places = source.batch(rows), torch.from_numpy(rows).to(target.device)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            drafted = head.drafts(batch, Noise(noise.temperatures[places], noise.keys[places]))
        accepted, signals = num_accepted(batch, drafted.tokens).cpu().numpy(), drafted.signals.float().cpu().numpy()
        for index, row in enumerate(rows.tolist()):
            first, last = int(sequences.prompt_lens[row]), int(sequences.lengths[row]) - 1
            steps = walk(accepted[index], first, last)
            observations += [observe(row, place, last, accepted[index, place], signals[index, place]) for place in steps]
    return np.concatenate(observations)


def _fit(observations: np.ndarray, temperature: float, num_drafts: int) -> SampledFit:
    row, position, log_odds, accepted = observations[:, 0], observations[:, 1].astype(np.int64), observations[:, 2], observations[:, 5]
    inputs = np.stack((-np.logaddexp(0, -log_odds), np.logaddexp(0, log_odds)), -1)  # ln p, -ln(1 - p)
    is_fit = row % 2 == 0
    fits = np.round(np.stack(fit_positions(inputs[is_fit], position[is_fit], accepted[is_fit], num_drafts)), 4)
    weights = fits[position[~is_fit]]
    predicted = sigmoid((inputs[~is_fit] * weights[:, :-1]).sum(1) + weights[:, -1])
    error, area = calibration_error(predicted, accepted[~is_fit]), area_under_curve(predicted, accepted[~is_fit])
    return SampledFit(
        temperature, fits.tolist(), len(predicted), None if error is None else round(error, 4), None if area is None else round(area, 4)
    )
