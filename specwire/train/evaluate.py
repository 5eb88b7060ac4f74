"""What a trained head is worth on held-out prompts: drafts are walked through the target's answers as a server would."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from specwire.train.batches import Batch, BatchSource, plan_batches
from specwire.train.calibration import area_under_curve, calibration_error, fit_logistic, sigmoid
from specwire.train.deadline import Deadline
from specwire.train.heads import Head
from specwire.train.target import Target

TOKENS_AT_ONCE = 4096
_MIN_FIT = 200
"""Drafts of a position that a fit of its own needs; with fewer it has the one of all positions."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Steps over answers of one kind.

    Args:
        acceptance_length: tokens per step (accepted drafts and the next token).
        acceptance_by_position: share of steps whose first i + 1 drafts were accepted.
    """

    num_sequences: int
    num_tokens: int
    num_steps: int
    acceptance_length: float
    acceptance_by_position: list[float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of a head on held-out prompts; drafts are the head's most likely tokens.

    Args:
        greedy: over greedy answers.
        sampled: over sampled answers; shared noise accepts more.
        calibration: (weight of the log-odds, bias) by position: P(accepted, if all before it are) = sigmoid(weight x log-odds + bias).
        calibration_error: of that fit, over greedy answers that it was not fitted on (ECE, ten bins).
        raw_calibration_error: of the drafter's own probability.
        area_under_curve: of the fit.
        wide_calibration_error, wide_area_under_curve: of a fit that has the margin to the second token and the entropy, too.

    Of these, None is what too few drafts can't tell.
    """

    greedy: Walk
    sampled: Walk
    calibration: list[list[float]]
    calibration_error: float | None
    raw_calibration_error: float | None
    area_under_curve: float | None
    wide_calibration_error: float | None
    wide_area_under_curve: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


class _Tally:
    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._num_sequences = self._num_tokens = self._num_steps = 0
        self._accepted = np.zeros(num_drafts)

    def add(self, num_tokens: int, accepted: np.ndarray) -> None:
        """A sequence of num_tokens behind its first, and the accepted drafts of each of its steps."""
        self._num_sequences += 1
        self._num_tokens += num_tokens
        self._num_steps += len(accepted)
        self._accepted += (accepted[:, None] > np.arange(self._num_drafts)).sum(0)

    def walk(self) -> Walk:
        steps = max(self._num_steps, 1)
        shares = [round(float(share), 4) for share in self._accepted / steps]
        return Walk(self._num_sequences, self._num_tokens, self._num_steps, round(self._num_tokens / steps, 4), shares)


def evaluate(head: Head, target: Target, source: BatchSource, num_drafts: int, deadline: Deadline) -> Evaluation:
    """Evaluates and calibrates.

    Raises:
        TimeUp: the deadline came first.
    """
    sequences = source.sequences
    held_out = np.flatnonzero(sequences.is_held_out)
    plan = plan_batches(sequences.lengths[held_out], TOKENS_AT_ONCE, source.pad_to, np.random.default_rng(0))
    greedy, sampled = _Tally(num_drafts), _Tally(num_drafts)
    observations: list[np.ndarray] = []  # [N, 6]: sequence, position, three signals, accepted
    for chosen in plan:
        deadline.check()
        rows = held_out[chosen]
        batch = source.batch(rows)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            drafted = head.drafts(batch)
        accepted = num_accepted(batch, drafted.tokens).cpu().numpy()
        signals = drafted.signals.float().cpu().numpy()
        for index, row in enumerate(rows.tolist()):
            first, last = int(sequences.prompt_lens[row]), int(sequences.lengths[row]) - 1
            places = walk(accepted[index], first, last)
            is_greedy = bool(sequences.is_greedy[row])
            (greedy if is_greedy else sampled).add(last - first, accepted[index, places])
            if is_greedy:
                observations += [observe(row, place, last, accepted[index, place], signals[index, place]) for place in places]
    return Evaluation(greedy.walk(), sampled.walk(), **_calibrate(np.concatenate(observations) if observations else np.zeros((0, 6)), num_drafts))


def num_accepted(batch: Batch, drafts: torch.Tensor) -> torch.Tensor:
    """[B, L]: how many of the drafts behind each token [B, L, K] are what follows in the answer."""
    padded = torch.nn.functional.pad(batch.tokens, (0, drafts.shape[-1]), value=-1)
    following = padded.unfold(1, drafts.shape[-1], 1)[:, 1:]  # [B, L, K]
    places = torch.arange(drafts.shape[1], device=drafts.device)[:, None] + 1 + torch.arange(drafts.shape[-1], device=drafts.device)
    matches = (drafts == following) & (places < batch.lengths[:, None, None])
    return matches.long().cumprod(-1).sum(-1)


def walk(accepted: np.ndarray, first: int, last: int) -> list[int]:
    """Where steps begin: at the first token of the answer, then behind accepted drafts and the next token, until the last token is known."""
    places = []
    while first < last:
        places.append(first)
        first += int(accepted[first]) + 1
    return places


def observe(row: int, place: int, last: int, accepted: int, signals: np.ndarray) -> np.ndarray:
    """A row for each draft whose outcome is known: those accepted, and the first that was not."""
    count = min(accepted + 1, len(signals), last - place)
    outcome = np.arange(count) < accepted
    return np.column_stack((np.full(count, row), np.arange(count), signals[:count], outcome))


def _calibrate(observations: np.ndarray, num_drafts: int) -> dict[str, Any]:
    """Fits on half of the sequences, measures on the others."""
    sequence, position, signals, accepted = observations[:, 0], observations[:, 1], observations[:, 2:5], observations[:, 5]
    is_fit = np.unique(sequence, return_inverse=True)[1] % 2 == 0
    tested = ~is_fit
    predicted = {}
    fits: list[np.ndarray] = []
    for name, inputs in (("wide", signals), ("narrow", signals[:, :1])):
        fits = fit_positions(inputs[is_fit], position[is_fit], accepted[is_fit], num_drafts)
        weights = np.stack(fits)[position[tested].astype(np.int64)]
        predicted[name] = sigmoid((inputs[tested] * weights[:, :-1]).sum(1) + weights[:, -1])
    outcome = accepted[tested]
    raw = sigmoid(signals[tested, 0])
    return {
        "calibration": [[round(float(value), 4) for value in weights] for weights in fits],
        "calibration_error": _rounded(calibration_error(predicted["narrow"], outcome)),
        "raw_calibration_error": _rounded(calibration_error(raw, outcome)),
        "area_under_curve": _rounded(area_under_curve(predicted["narrow"], outcome)),
        "wide_calibration_error": _rounded(calibration_error(predicted["wide"], outcome)),
        "wide_area_under_curve": _rounded(area_under_curve(predicted["wide"], outcome)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def fit_positions(inputs: np.ndarray, position: np.ndarray, accepted: np.ndarray, num_drafts: int) -> list[np.ndarray]:
    """Weights of `fit_logistic` for each position; those with too few drafts have the fit of all."""
    overall = fit_logistic(inputs, accepted)
    fits = []
    for index in range(num_drafts):
        is_here = position == index
        fits.append(fit_logistic(inputs[is_here], accepted[is_here]) if is_here.sum() >= _MIN_FIT else overall)
    return fits
