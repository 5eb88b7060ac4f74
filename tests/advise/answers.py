"""Answers of a made-up target and drafter, of which it is known for each token whether its draft would be accepted."""

import numpy as np

from specwire.advise.drafts import AnswerDrafts


def walk(outcomes: np.ndarray, k: int) -> tuple[list[int], list[int]]:
    """(drafts, accepted ones) of each step of k drafts over tokens whose drafts are accepted where outcomes [n] is true."""
    num_drafts, num_accepted, start = [], [], 0
    while start < len(outcomes):
        drafted = outcomes[start : start + k]
        accepted = len(drafted) if drafted.all() else int(np.argmin(drafted))
        num_drafts.append(len(drafted))
        num_accepted.append(accepted)
        start += accepted + 1
    return num_drafts, num_accepted


def answer(outcomes: np.ndarray, k: int, *, score: float = 0.5, num_plain: int = 0, weight: float = 1.0) -> AnswerDrafts:
    """What the coordinator reports of it, with the same score for all drafts."""
    num_drafts, num_accepted = walk(outcomes, k)
    return AnswerDrafts(tuple(num_drafts), tuple(num_accepted), (score,) * sum(num_drafts), num_plain, weight)


def random_outcomes(rate: float, num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(num_tokens) < rate
