"""Features out of a verifier's memory on the same host."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specwire.engine.features.pool import FeaturePool, token_slots
from specwire.engine.heads.source import FeatureSource
from specwire.errors import FailedPreconditionError

if TYPE_CHECKING:
    from .features import Located


class SharedFeatures:
    """See `FeaturePath`.

    Args:
        name: of the verifier's pool.
        source: which features.

    Raises:
        UnavailableError: the memory can't be reached from here.
        FailedPreconditionError: the verifier does not keep these features there.
    """

    def __init__(self, name: str, source: FeatureSource) -> None:
        self._pool = FeaturePool.open(name)
        sets = {one.hash: one for one in self._pool.layout.sets}
        bytes_per_token = source.width * source.dtype.itemsize
        if source.hash not in sets or sets[source.hash].bytes_per_token != bytes_per_token:
            raise FailedPreconditionError(f"the verifier keeps no features of {source.name} ({source.hash}); start it with --features and that head")
        self._source = source
        self._rows = self._pool.rows(source.hash)

    def read(self, spans: Sequence["Located"]) -> list[torch.Tensor | None]:
        """See `FeaturePath.read`."""
        words, size, num_rows = self._pool.words, self._pool.layout.block_size, len(self._rows)
        live = [span for span in spans if words[span.place] == span.generation]
        if not live:
            return [None] * len(spans)
        numbers = token_slots([(span.block_ids, span.first, span.num_positions) for span in live], size)
        if not 0 <= numbers.min() <= numbers.max() < num_rows:
            raise FailedPreconditionError(
                f"a handle names token {numbers.max()} of {num_rows} in the verifier's memory; run the same version everywhere"
            )
        copied = torch.from_numpy(self._rows[numbers]).view(self._source.dtype)  # [positions of all spans, width]
        parts = dict(zip(map(id, live), copied.split([span.num_positions for span in live]), strict=True))
        # Only now: whoever has lost its place by this time may have lost its blocks.
        return [parts[id(span)] if id(span) in parts and words[span.place] == span.generation else None for span in spans]

    def close(self) -> None:
        """See `FeaturePath.close`; the mapping goes with its last array."""
