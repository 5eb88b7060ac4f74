"""Drafts of several rows as they are drawn, position by position, with what they were drawn from where that is wanted."""

from collections.abc import Sequence

import numpy as np

from specwire.config import DrafterConfig
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.sampling.draft import DraftSamples
from specwire.engine.sampling.proposal import ProposedDrafts
from specwire.proposals import MAX_CANDIDATES, RowProposals


def wanted_candidates(config: DrafterConfig) -> int:
    """Tokens that a model's drafts are drawn from, with private noise, for the ratio test; 0: drafts are drawn with the target's noise."""
    spec = config.speculative_config
    if spec.rejection_sample_method != "probabilistic" or spec.draft_sample_method == "greedy":
        return 0
    return MAX_CANDIDATES


class Drawn:
    """The drafts of some rows so far.

    Args:
        num_rows: of the call.
    """

    def __init__(self, num_rows: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._probs: list[list[float]] = [[] for _ in range(num_rows)]
        self._proposals: list[list[RowProposals]] = [[] for _ in range(num_rows)]

    def add(self, rows: Sequence[int], samples: DraftSamples, scores: Sequence[float] | None = None) -> None:
        """One more draft of each of these rows, which may come several times.

        Args:
            scores: instead of the drafts' probabilities.
        """
        probs = samples.probs.clamp(max=1.0).tolist() if scores is None else scores
        for row, token_id, prob in zip(rows, samples.token_ids.tolist(), probs, strict=True):
            self.token_ids[row].append(token_id)
            self._probs[row].append(prob)
        if isinstance(samples, ProposedDrafts):
            every = RowProposals(samples.candidate_ids.cpu().numpy().astype(np.int32), samples.candidate_probs.cpu().numpy())
            for position, row in enumerate(rows):
                self._proposals[row].append(every.only(position))

    def drafts(self) -> list[DraftTokens]:
        """Of each row."""
        return [
            DraftTokens(token_ids, probs, _joined(own)) for token_ids, probs, own in zip(self.token_ids, self._probs, self._proposals, strict=True)
        ]


def _joined(parts: Sequence[RowProposals]) -> RowProposals | None:
    if not parts:
        return None
    return RowProposals(np.concatenate([part.token_ids for part in parts]), np.concatenate([part.probs for part in parts]))
