"""Which noise words the ids that a head drafts have, in the order in which they are made."""

from dataclasses import dataclass

import numpy as np

from specwire.engine.cpu.draft_choice import LANES

_WORDS = 4
"""Of a block of Philox, for as many ids."""


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """Blocks by 16, and the columns whose words they hold; see `DraftWord`."""

    ids: np.ndarray  # int64 [n], the target's id of each column
    blocks: np.ndarray  # int64 [groups, 16]
    starts: np.ndarray  # int64 [groups + 1]
    columns: np.ndarray  # int64 [n, 2]

    @classmethod
    def make(cls, ids: np.ndarray) -> "NoisePlan":
        """For columns whose ids of the target are ids [n]."""
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        blocks, number = np.unique(ids[order] // _WORDS, return_inverse=True)  # [m], and of each column in order its block's place
        num_groups = -(-len(blocks) // LANES)
        padded = np.append(blocks, np.full(num_groups * LANES - len(blocks), blocks[-1]))
        starts = np.searchsorted(number, np.arange(num_groups + 1) * LANES)
        words = ids[order] % _WORDS * LANES + number % LANES
        return cls(ids, padded.reshape(num_groups, LANES), starts.astype(np.int64), np.ascontiguousarray(np.stack((order, words), 1)))
