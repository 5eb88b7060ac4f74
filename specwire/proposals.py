"""What a drafter drew each draft from, for the ratio test: a few candidates with their probabilities (docs/design.md section 3)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specwire.errors import InvalidArgumentError
from specwire.messages import Proposals

MAX_CANDIDATES = 32
"""Candidates that a drafter draws from, the likeliest ones; more are not taken."""
BYTES_PER_DRAFT = 8 * MAX_CANDIDATES
_TOLERANCE = 1e-3


class RowProposals(NamedTuple):
    """Of the drafts of one sequence. Padding repeats any id with probability 0."""

    token_ids: NDArray[np.int32]  # [K, m]
    probs: NDArray[np.float32]  # [K, m]

    def first(self, num_drafts: int) -> "RowProposals":
        """Of the leading drafts."""
        return RowProposals(self.token_ids[:num_drafts], self.probs[:num_drafts])

    def only(self, position: int) -> "RowProposals":
        """Of one draft."""
        return RowProposals(self.token_ids[position : position + 1], self.probs[position : position + 1])


def one_hot(draft_tokens: Sequence[int]) -> RowProposals:
    """Of drafts that were not drawn, as those of a lookup: nothing else could have been drafted."""
    return RowProposals(np.array(draft_tokens, dtype=np.int32)[:, None], np.ones((len(draft_tokens), 1), dtype=np.float32))


def join_proposals(rows: Sequence[tuple[Sequence[int], RowProposals | None]]) -> Proposals | None:
    """Of all drafts of a message: (drafts, what they were drawn from, None = nothing else could have been) of each row. None: no row has any."""
    if not any(drafts and own is not None for drafts, own in rows):
        return None
    token_ids, probs = join_rows([one_hot(drafts) if own is None else own for drafts, own in rows if drafts])
    return Proposals(token_ids.shape[1], token_ids.ravel().tolist(), probs.ravel().tolist())


def join_rows(parts: Sequence[RowProposals]) -> RowProposals:
    """One after another, padded to the most candidates."""
    num_candidates = max(part.token_ids.shape[1] for part in parts)
    wide = [_widened(part, num_candidates) for part in parts]
    return RowProposals(np.concatenate([part.token_ids for part in wide]), np.concatenate([part.probs for part in wide]))


def split_proposals(proposals: Proposals, rows: Sequence[Sequence[int]]) -> list[RowProposals | None]:
    """Of each row, given its drafts; None where there are none.

    Raises:
        InvalidArgumentError: too many candidates, or other numbers of ids and probabilities than the drafts need.
    """
    num_candidates, num_drafts = proposals.num_candidates, sum(map(len, rows))
    if not 1 <= num_candidates <= MAX_CANDIDATES:
        raise InvalidArgumentError(f"proposals have {num_candidates} candidates a draft; send 1 to {MAX_CANDIDATES}")
    if not len(proposals.token_ids) == len(proposals.probs) == num_drafts * num_candidates:
        raise InvalidArgumentError(
            f"proposals have {len(proposals.token_ids)} ids and {len(proposals.probs)} probabilities, but {num_drafts} drafts of {num_candidates} "
            "candidates; send as many of each"
        )
    token_ids = np.array(proposals.token_ids, dtype=np.int32).reshape(num_drafts, num_candidates)
    probs = np.array(proposals.probs, dtype=np.float32).reshape(num_drafts, num_candidates)
    split, start = list[RowProposals | None](), 0
    for drafts in rows:
        end = start + len(drafts)
        split.append(RowProposals(token_ids[start:end], probs[start:end]) if drafts else None)
        start = end
    return split


def what_is_wrong(draft_tokens: Sequence[int], proposals: RowProposals, vocab_size: int) -> str:
    """Why drafts can't have been drawn from these candidates; empty if they can."""
    token_ids, probs = proposals
    if len(token_ids) and not (token_ids.min() >= 0 and token_ids.max() < vocab_size):
        return f"a candidate's id is outside of the vocabulary, 0 to {vocab_size - 1}"
    if not (np.isfinite(probs).all() and (probs >= 0).all() and (np.abs(probs.sum(axis=1) - 1.0) <= _TOLERANCE).all()):
        return "the candidates' probabilities are not numbers from 0 on whose sum is 1"
    is_own = token_ids == np.array(draft_tokens, dtype=np.int64)[:, None]  # [K, m]
    if not (np.where(is_own, probs, 0.0).sum(axis=1) > 0).all():
        return "a draft is none of the candidates that it was drawn from"
    return ""


def _widened(proposals: RowProposals, num_candidates: int) -> RowProposals:
    missing = num_candidates - proposals.token_ids.shape[1]
    if not missing:
        return proposals
    return RowProposals(np.pad(proposals.token_ids, ((0, 0), (0, missing)), mode="edge"), np.pad(proposals.probs, ((0, 0), (0, missing))))
