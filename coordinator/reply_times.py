"""How long a drafter takes to answer: a running quantile by K and number of sequences."""

from collections import deque
from collections.abc import Sequence

from specwire.messages import DraftCost

_WINDOW = 32
_SEED_WEIGHT = 8
_QUANTILE = 0.9


class ReplyTimes:
    """Predicts the time of a reply in seconds.

    Args:
        costs: what the drafter measured at its start; without them the first predictions are 0.
    """

    def __init__(self, costs: Sequence[DraftCost] = ()) -> None:
        self._costs = sorted(costs, key=lambda cost: (cost.num_sequences, cost.num_draft_tokens))
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._predicted: dict[tuple[int, int], float] = {}

    def predict(self, num_draft_tokens: int, num_sequences: int) -> float:
        key = num_draft_tokens, num_sequences.bit_length()
        if key not in self._predicted:
            self._predicted[key] = self._seed(num_draft_tokens, num_sequences)
        return self._predicted[key]

    def record(self, num_draft_tokens: int, num_sequences: int, reply_s: float, most_s: float) -> None:
        """Takes a reply into account, as most_s where it took longer: one that hung for a minute must not make the next wait minutes."""
        key = num_draft_tokens, num_sequences.bit_length()
        samples = self._samples.get(key)
        if samples is None:
            seed = self.predict(num_draft_tokens, num_sequences)
            samples = self._samples[key] = deque([seed] * _SEED_WEIGHT if seed else (), maxlen=_WINDOW)
        samples.append(min(reply_s, most_s))
        self._predicted[key] = sorted(samples)[int(_QUANTILE * (len(samples) - 1))]

    def _seed(self, num_draft_tokens: int, num_sequences: int) -> float:
        """The cost of the smallest measured call that is at least as large; where none is, that of the largest, in proportion to the sequences."""
        if not self._costs:
            return 0.0
        larger = [cost for cost in self._costs if cost.num_sequences >= num_sequences and cost.num_draft_tokens >= num_draft_tokens]
        if larger:
            return larger[0].draft_ms / 1000
        largest = self._costs[-1]
        return largest.draft_ms * max(1.0, num_sequences / max(1, largest.num_sequences)) / 1000
