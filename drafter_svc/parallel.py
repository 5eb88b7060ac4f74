"""A draft model that was trained to predict all drafts in one pass, over mask tokens behind the text (PARD, https://arxiv.org/abs/2504.18583)."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specwire.engine.batch import Segment
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.errors import InvalidArgumentError
from specwire.json_files import read_json_object

from .drawn import Drawn
from .forward import EagerForward

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def read_mask_token_id(folder: Path, vocab_size: int) -> int:
    """The id that stands for a token to be predicted, from a model's config.json.

    Raises:
        InvalidArgumentError: there is none, or it is outside of the vocabulary.
    """
    config = read_json_object(folder / "config.json")
    name = next((name for name in _MASK_KEYS if config.get(name) is not None), None)
    if name is None:
        raise InvalidArgumentError(
            f"parallel_drafting is true, but config.json of {folder} has none of {', '.join(_MASK_KEYS)}: it was not trained for that; leave it out"
        )
    token_id = config[name]
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise InvalidArgumentError(f"config.json of {folder} has {name} {token_id!r}, but the vocabulary is 0 to {vocab_size - 1}")
    return token_id


class ParallelForward:
    """See `DraftForward`. One pass: the last token predicts the first draft, a mask token each further one; none is fed.

    Args:
        eager: runs the model.
        mask_token_id: of the draft model.
    """

    def __init__(self, eager: EagerForward, mask_token_id: int) -> None:
        self._eager = eager
        self._mask_token_id = mask_token_id

    @property
    def counts(self) -> PassCounts:
        return self._eager.counts

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """See `DraftForward.open`."""
        self._eager.open(slot, sampling)

    def compute(self, rows: Sequence[DraftRow]) -> None:
        """See `DraftForward.compute`."""
        self._eager.compute(rows)

    def launch(self, rows: Sequence[DraftRow]) -> Callable[[], list[DraftTokens]]:
        """See `DraftForward.launch`; nothing is left to wait for."""
        eager = self._eager
        known = [eager.model_ids(row.token_ids) for row in rows]
        masks = [[self._mask_token_id] * (row.num_drafts - 1) for row in rows]
        hidden, starts = eager.run(
            [Segment([*ids, *mask], row.start_position, row.block_table) for row, ids, mask in zip(rows, known, masks, strict=True)]
        )
        picked = [starts[i] + len(ids) - 1 + position for i, ids in enumerate(known) for position in range(rows[i].num_drafts)]
        samples = eager.draw(
            hidden[torch.tensor(picked, device=hidden.device)],
            [row.slot for row in rows for _ in range(row.num_drafts)],
            [row.start_position + len(row.token_ids) + position for row in rows for position in range(row.num_drafts)],
        )
        drawn = Drawn(len(rows))
        drawn.add([index for index, row in enumerate(rows) for _ in range(row.num_drafts)], samples)
        return drawn.drafts
