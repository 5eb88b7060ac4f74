"""Drafts that are accepted at rates that both ends of a benchmark know: a request's seed says at which, so that nothing else has to travel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafter_svc.method import Ask, Drafts, Method
from specwire.engine.counts import PassCounts
from specwire.messages import DraftOpen, GenerateRequest, ServiceDescription
from specwire.sampling_params import SamplingParams

_PERCENTS, _TENTHS = 100, 10


@dataclass(frozen=True, slots=True)
class KnownRate:
    """What is known of a request's drafts.

    Args:
        rate: probability that a draft is accepted once those before it are; hundredths.
        sigma: standard deviation of the noise of confidences, in log-odds; tenths below 1.
    """

    rate: float
    sigma: float

    def seed(self, number: int) -> int:
        """Of the request of this number; one of another number has other noise."""
        return (number * _TENTHS + round(self.sigma * _TENTHS)) * _PERCENTS + round(self.rate * _PERCENTS)

    @classmethod
    def of(cls, seed: int) -> "KnownRate":
        """What a seed says; of any other number a rate between 0.01 and 0.99."""
        return cls(min(max(seed % _PERCENTS, 1), _PERCENTS - 1) / _PERCENTS, seed // _PERCENTS % _TENTHS / _TENTHS)


def make_request(prompt: list[int], number: int, known: KnownRate, num_draft_tokens: int, max_tokens: int) -> GenerateRequest:
    """Greedy, `max_tokens` tokens whatever they are. Drafts of requests of one number fare equally at equal places, whatever is drafted elsewhere.

    Args:
        num_draft_tokens: K_max of the verifier.
    """
    rates = tuple(known.rate**position for position in range(1, num_draft_tokens + 1))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=known.seed(number))
    return GenerateRequest(prompt, params, synthetic_acceptance_rates=rates)


class KnownRates:
    """A drafting method whose scores are the requests' true rates behind noise, drawn anew for every draft; the drafts are another method's, which
    needs no features."""

    features = None

    def __init__(self, method: Method) -> None:
        self._method = method
        max_num_seqs = method.description.max_num_seqs
        self._log_odds, self._sigmas = np.zeros(max_num_seqs), np.zeros(max_num_seqs)
        self._rng = np.random.default_rng(0)

    @property
    def description(self) -> ServiceDescription:
        return self._method.description

    @property
    def num_free_blocks(self) -> int:
        return self._method.num_free_blocks

    @property
    def counts(self) -> PassCounts:
        return self._method.counts

    def open(self, seq_id: int, request: DraftOpen) -> None:
        self._method.open(seq_id, request)
        known = KnownRate.of(request.noise_key)
        self._log_odds[seq_id], self._sigmas[seq_id] = math.log(known.rate / (1 - known.rate)), known.sigma

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._method.append(seq_id, token_ids)

    def close(self, seq_id: int) -> None:
        self._method.close(seq_id)

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        answers = self._method.propose(asks)
        most = max([len(answer.token_ids) for answer in answers], default=0)
        seq_ids = [ask.seq_id for ask in asks]
        noise = self._rng.standard_normal((len(asks), most))
        scores = 1 / (1 + np.exp(-self._log_odds[seq_ids, None] - self._sigmas[seq_ids, None] * noise))
        return [Drafts(answer.status, answer.token_ids, row[: len(answer.token_ids)]) for answer, row in zip(answers, scores.tolist(), strict=True)]

    def catch_up(self, budget: int) -> int:
        return self._method.catch_up(budget)
