"""Features out of a verifier's memory on the same host: the host's, or a GPU's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specwire.engine.features.device import DeviceMemory, open_pages
from specwire.engine.features.pool import FeaturePool, token_slots
from specwire.engine.heads.source import FeatureSource
from specwire.errors import FailedPreconditionError, UnavailableError

if TYPE_CHECKING:
    from .features import Located


class SharedFeatures:
    """See `FeaturePath`.

    Args:
        name: of the verifier's pool.
        source: which features.
        device: of the drafter; memory of a GPU is read by drafters on one alone, the same or another one.

    Raises:
        UnavailableError: the memory can't be reached from here.
        FailedPreconditionError: the verifier does not keep these features there.
    """

    def __init__(self, name: str, source: FeatureSource, device: str = "cpu") -> None:
        self._pool = FeaturePool.open(name)
        sets = {one.hash: one for one in self._pool.layout.sets}
        bytes_per_token = source.width * source.dtype.itemsize
        if source.hash not in sets or sets[source.hash].bytes_per_token != bytes_per_token:
            raise FailedPreconditionError(f"the verifier keeps no features of {source.name} ({source.hash}); start it with --features and that head")
        self._source = source
        memory, layout = sets[source.hash].device_memory, self._pool.layout
        self._num_rows = (layout.num_blocks + 1) * layout.block_size
        self._pages: torch.Tensor | None = None  # on a GPU [num_rows, width]
        if memory is None:
            self._rows = self._pool.rows(source.hash)
        elif device == "cpu":
            raise UnavailableError("the verifier's features are on a GPU, and this drafter is not")
        else:
            self._pages = open_pages(DeviceMemory(*memory), source.dtype, (self._num_rows, source.width), device)

    def read(self, spans: Sequence["Located"]) -> list[torch.Tensor | None]:
        """See `FeaturePath.read`."""
        words, size, num_rows = self._pool.words, self._pool.layout.block_size, self._num_rows
        for span in spans:
            self._check(span)
        live = [span for span in spans if words[span.place] == span.generation]
        if not live:
            return [None] * len(spans)
        numbers = token_slots([(span.block_ids, span.first, span.num_positions) for span in live], size)
        if not 0 <= numbers.min() <= numbers.max() < num_rows:
            raise FailedPreconditionError(
                f"a handle names token {numbers.max()} of {num_rows} in the verifier's memory; run the same version everywhere"
            )
        copied = self._copy(numbers)  # [positions of all spans, width]
        parts = dict(zip(map(id, live), copied.split([span.num_positions for span in live]), strict=True))
        # Only now: whoever has lost its place by this time may have lost its blocks.
        return [parts[id(span)] if id(span) in parts and words[span.place] == span.generation else None for span in spans]

    def _check(self, span: "Located") -> None:
        """Raise FailedPreconditionError unless the memory has such a place, and the sequence blocks for such positions."""
        layout = self._pool.layout
        end, known = span.first + span.num_positions, len(span.block_ids) * layout.block_size
        if not 0 <= span.place < layout.num_places or end > known:
            raise FailedPreconditionError(
                f"a handle names place {span.place} of {layout.num_places} and position {end} of {known} in the verifier's memory; "
                "run the same version everywhere"
            )

    def _copy(self, numbers: np.ndarray) -> torch.Tensor:
        """The copy is done when this returns."""
        if self._pages is None:
            return torch.from_numpy(self._rows[numbers]).view(self._source.dtype)
        copied = self._pages.index_select(0, torch.from_numpy(numbers).to(self._pages.device))
        torch.cuda.current_stream(copied.device).synchronize()
        return copied

    def close(self) -> None:
        """See `FeaturePath.close`; the mapping goes with its last array."""
