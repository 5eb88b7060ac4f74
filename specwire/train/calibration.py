"""What a draft's probability is worth as the probability of its acceptance: logistic fits, and how far off they are."""

import numpy as np

_NUM_BINS = 10
_MAX_STEPS = 50
_RIDGE = 1e-3


def fit_logistic(inputs: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Weights [n + 1], the bias last, of P(accepted) = sigmoid(inputs [N, n] weights + bias), by Newton's method."""
    design = np.concatenate((inputs, np.ones((len(inputs), 1))), 1).astype(np.float64)
    weights = np.zeros(design.shape[1])
    for _ in range(_MAX_STEPS):
        probs = sigmoid(design @ weights)
        gradient = design.T @ (probs - accepted) + _RIDGE * weights
        hessian = (design * (probs * (1 - probs))[:, None]).T @ design + _RIDGE * np.eye(len(weights))
        change = np.linalg.solve(hessian, gradient)
        # A full step overshoots where the classes are nearly separable.
        weights -= change * min(1.0, 4.0 / max(np.abs(change).max(), 1e-12))
        if np.abs(change).max() < 1e-8:
            break
    return weights


def calibration_error(predicted: np.ndarray, accepted: np.ndarray) -> float | None:
    """Expected calibration error: mean of |predicted - observed| over ten bins of the prediction, weighted by their drafts; None without drafts."""
    if len(predicted) == 0:
        return None
    bins = np.minimum((predicted * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    differences = np.bincount(bins, predicted - accepted, _NUM_BINS)
    return float(np.abs(differences).sum() / len(predicted))


def area_under_curve(predicted: np.ndarray, accepted: np.ndarray) -> float | None:
    """Probability that an accepted draft was predicted higher than a rejected one, ties counting half; None if there are not both."""
    num_accepted = int(accepted.sum())
    num_rejected = len(accepted) - num_accepted
    if num_accepted == 0 or num_rejected == 0:
        return None
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[accepted.astype(bool)].sum() - num_accepted * (num_accepted + 1) / 2) / (num_accepted * num_rejected))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))
