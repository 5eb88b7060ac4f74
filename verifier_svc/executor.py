"""What the verifier needs of whatever runs its rounds."""

from collections.abc import Sequence
from typing import Protocol

import torch

from specwire.engine.block_manager import BlockManager
from specwire.engine.graphs.runner import RoundCounts
from specwire.engine.kv_cache import KVCache
from specwire.engine.sampling.segments import SegmentTokens
from specwire.engine.sampling.slot import SlotSampling

from .plan import Segment
from .slots import Slot


class PendingRound(Protocol):
    """Segments on their way."""

    def is_done(self) -> bool:
        """Whether `results` has nothing to wait for."""
        ...

    def wait(self) -> None:
        """Returns once `results` has nothing to wait for. Any thread may call it, at any time."""
        ...

    def results(self) -> list[SegmentTokens]:
        """Waits; one output a segment, in order: without tokens for a prefill chunk that ends early. To be called once."""
        ...


class Executor(Protocol):
    """Runs rounds one after the other, in the order of their launches. Not thread-safe: one thread uses it at a time.

    Attributes:
        kv_cache: of all slots.
        sampling_device: where the host's sampling state of slots is.
        counts: what has run.
    """

    @property
    def kv_cache(self) -> KVCache: ...
    @property
    def sampling_device(self) -> torch.device: ...
    @property
    def counts(self) -> RoundCounts: ...

    def open(self, slot: Slot) -> None:
        """A new sequence, from the next round on."""
        ...

    def close(self, slot: Slot) -> None:
        """Its end; rounds that are launched still run it."""
        ...

    def samples_on_host(self, sampling: SlotSampling) -> bool:
        """Whether the host samples a slot's segments at their launch: then all tokens before them must be read."""
        ...

    def launch(self, segments: Sequence[Segment], blocks: BlockManager) -> PendingRound:
        """Starts a round of at least one segment, whose blocks are reserved."""
        ...
