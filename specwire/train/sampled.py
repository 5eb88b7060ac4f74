"""How a head drafts where requests sample, and what its scores are worth there: target and drafts share their noise, so acceptance depends on the
temperature."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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

MOST_PROMPTS = 256
"""That are answered at each temperature."""
_FIRST_KEY, _KEY_STEP = 1, 7919
_MIN_DRAFTS = 1000
"""With fewer there is no fit for the temperature, and the head's logits stay as they are."""
FACTORS = (1.0, 1.1, 1.2, 1.3, 1.45)
"""That the logits may be multiplied by."""
_LEAST_GAIN = 0.01
"""Of tokens a step, that a factor must bring."""


@dataclass(frozen=True, slots=True)
class SampledFit:
    """Of answers at one temperature, generated and drafted with the same noise.

    Args:
        weights_by_position: (a, b, c) of P(accepted, if all before are) = sigmoid(a ln p - b ln(1 - p) + c), p the draft's probability at the
            temperature, of sharpened logits.
        num_drafts, calibration_error, area_under_curve: of the answers that it was not fitted on.
    """

    temperature: float
    weights_by_position: list[list[float]]
    num_drafts: int
    calibration_error: float | None
    area_under_curve: float | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was found of sampled answers.

    Args:
        sharpness: the head's logits are multiplied by it before noise is added (`draft_sharpness`).
        gain: what that adds to the tokens a step, mean of the temperatures, on answers that it was not chosen by; None = too few drafts to choose.
        fits: by temperature, with that sharpness.
    """

    sharpness: float = 1.0
    gain: float | None = None
    fits: tuple[SampledFit, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"draft_sharpness": self.sharpness, "draft_sharpness_gain": self.gain, "with_shared_noise": [asdict(fit) for fit in self.fits]}


def fit_sampled(
    head: Head,
    target: Target,
    jobs: Sequence[Job],
    layers: tuple[int, ...],
    num_drafts: int,
    max_new: int,
    temperatures: Sequence[float],
    deadline: Deadline,
    most_prompts: int = MOST_PROMPTS,
) -> Sampled:
    """Answers held-out prompts at each temperature, drafts with each factor, and chooses and fits by one half of the answers; temperatures with too
    few drafts are left out.

    Args:
        jobs: of which the held-out ones count.
        layers: whose hidden states the head reads.
        max_new: most tokens of an answer.
        most_prompts: at each temperature.

    Raises:
        TimeUp: the deadline came first.
    """
    prompts = sorted({tuple(job.prompt) for job in jobs if job.is_held_out})
    # By length, as batches are padded.
    order = sorted(np.random.default_rng(0).permutation(len(prompts))[:most_prompts].tolist(), key=lambda index: len(prompts[index]))
    asked = [Job(list(prompts[index]), temperature, is_held_out=True) for temperature in temperatures for index in order]
    device = target.device
    noise = Noise(
        torch.tensor([job.temperature for job in asked], dtype=torch.float32, device=device),
        torch.arange(len(asked), dtype=torch.int64, device=device) * _KEY_STEP + _FIRST_KEY,
    )
    answers = generate(target, asked, max_new, 0, lambda share: deadline.check(), noise=noise)
    found = _observations(head, target, _joined(asked, answers), noise, layers, deadline)
    parts = {factor: [rows[rows[:, 0] // len(order) == number] for number in range(len(temperatures))] for factor, rows in found.items()}
    is_enough = [len(part) >= _MIN_DRAFTS for part in parts[1.0]]
    if not any(is_enough):
        return Sampled()
    sharpness, gain = choose_sharpness({factor: list(itertools.compress(rows, is_enough)) for factor, rows in parts.items()})
    fitted = zip(temperatures, parts[sharpness], is_enough, strict=True)
    return Sampled(sharpness, gain, tuple(_fit(rows, temperature, num_drafts) for temperature, rows, enough in fitted if enough))


def choose_sharpness(observations: Mapping[float, Sequence[np.ndarray]]) -> tuple[float, float]:
    """The factor that gives most tokens a step on half of the answers, mean of the temperatures, if it gains enough on the other half, else 1; and
    that gain.

    Args:
        observations: by factor, 1 among them, and temperature, see `specwire.train.evaluate.observe`.
    """
    halves = [{factor: _tokens_a_step(parts, half) for factor, parts in observations.items()} for half in (0, 1)]
    best = max(halves[0], key=lambda factor: halves[0][factor])
    gain = round(halves[1][best] / halves[1][1.0] - 1, 4)
    return (best, gain) if gain >= _LEAST_GAIN else (1.0, 0.0)


def _tokens_a_step(parts: Sequence[np.ndarray], half: int) -> float:
    """Mean of the temperatures; a step's first draft is always among the observations."""
    chosen = [part[part[:, 0] % 2 == half] for part in parts]
    return float(np.mean([1 + part[:, 5].sum() / max(1, (part[:, 1] == 0).sum()) for part in chosen]))


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


def _observations(
    head: Head, target: Target, sequences: Sequences, noise: Noise, layers: tuple[int, ...], deadline: Deadline
) -> dict[float, np.ndarray]:
    """By factor [N, 6], see `specwire.train.evaluate.observe`."""
    source = BatchSource(target, sequences, layers)
    observations = {factor: [np.zeros((0, 6))] for factor in FACTORS}
    for rows in plan_batches(sequences.lengths, TOKENS_AT_ONCE, source.pad_to, np.random.default_rng(0)):
        batch, own = source.batch(rows), noise.of(torch.from_numpy(rows).to(target.device))
        for factor, known in observations.items():
            deadline.check()
            with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
                drafted = head.drafts(batch, own.sharpened(factor))
            accepted, signals = num_accepted(batch, drafted.tokens).cpu().numpy(), drafted.signals.float().cpu().numpy()
            for index, row in enumerate(rows.tolist()):
                first, last = int(sequences.prompt_lens[row]), int(sequences.lengths[row]) - 1
                steps = walk(accepted[index], first, last)
                known += [observe(row, place, last, accepted[index, place], signals[index, place]) for place in steps]
    return {factor: np.concatenate(rows) for factor, rows in observations.items()}


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
