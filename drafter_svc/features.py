"""Where the features of a drafter's sequences are, and reading them: out of the verifier's memory where that can be reached, else over gRPC.

Nothing is read that is not committed: a handle says how many positions are there, and commits follow the features of the tokens before them. What
can't be had (the sequence lost its place, the verifier is gone) is no fault: its reader waits or drafts for others meanwhile.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from specwire.config import DrafterConfig
from specwire.engine.heads.source import FeatureSource
from specwire.errors import SpecwireError
from specwire.messages import FeatureHandle
from specwire.tls import client_tls

from .feature_counts import GRPC, MEMORY, FeatureCounts
from .feature_memory import SharedFeatures

logger = logging.getLogger(__name__)

_PAUSE_S = 2.0
"""After a failure nothing is asked of that verifier for so long."""


class Span(Protocol):
    """Positions first .. first + num_positions - 1 of a sequence."""

    @property
    def seq_id(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def num_positions(self) -> int: ...


class Located(NamedTuple):
    """A span as a verifier knows it."""

    place: int
    generation: int
    block_ids: Sequence[int]  # of the whole sequence
    first: int
    num_positions: int


class FeaturePath(Protocol):
    """A way to one verifier's features."""

    def read(self, spans: Sequence[Located]) -> list[torch.Tensor | None]:
        """Features [num_positions, width] of each span; None where the sequence is not there any more.

        Raises:
            SpecwireError: nothing can be read this way now.
        """
        ...

    def close(self) -> None:
        """Lets go of what it holds."""
        ...


Connect = Callable[[str, str], FeaturePath]
"""(address, the host name that it was found by or "") -> the way over gRPC."""


@dataclass(slots=True, eq=False)
class _Way:
    """A path, who uses it, and until when it rests."""

    label: str
    name: str
    path: FeaturePath
    num_sequences: int = 0
    rests_until_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Sequence:
    handle: FeatureHandle
    way: _Way
    num_positions: int
    block_ids: list[int] = field(default_factory=list)


class FeatureReader:
    """The features that one head reads, of all sequences of a drafter. Not thread-safe: the worker's thread owns it.

    Args:
        source: which features.
        connect: makes ways over gRPC.
        uses_memory: whether to read out of verifiers' memory at all.
        device: of the drafter.
        clock: seconds.

    Attributes:
        counts: what was read.
    """

    def __init__(
        self, source: FeatureSource, connect: Connect, *, uses_memory: bool = True, device: str = "cpu", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = FeatureCounts()
        self._source = source
        self._connect = connect
        self._uses_memory = uses_memory
        self._device = device
        self._clock = clock
        self._sequences: dict[int, _Sequence] = {}
        self._ways: dict[str, _Way] = {}
        self._unshared: set[str] = set()  # names of memory that can't be read from here

    @classmethod
    def from_config(cls, config: DrafterConfig, source: FeatureSource) -> "FeatureReader":
        """As a drafter's configuration says."""
        from .rpc import make_connect

        connect = make_connect(source, config.max_message_mb << 20, client_tls(config))
        return cls(source, connect, uses_memory=config.read_shared_features, device=config.device)

    def note(self, seq_id: int, handle: FeatureHandle) -> None:
        """What there is to know of a sequence now: the blocks since the last handle of its generation, and how many positions are there."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.handle.generation != handle.generation:
            self.close(seq_id)
            sequence = self._sequences[seq_id] = _Sequence(handle, self._way(handle), 0)
            sequence.way.num_sequences += 1
        sequence.block_ids += handle.new_block_ids
        sequence.num_positions = max(sequence.num_positions, handle.first_position + handle.num_positions)

    def grew(self, seq_id: int, num_positions: int) -> None:
        """So many positions are there by now: a token was committed behind them."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            sequence.num_positions = max(sequence.num_positions, num_positions)

    def num_ready(self, seq_id: int, num_tokens: int) -> int:
        """Leading positions of num_tokens committed tokens whose features can be read now: at most num_tokens - 1."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.way.rests_until_s > self._clock():
            return 0
        return max(0, min(sequence.num_positions, num_tokens - 1))

    def read(self, spans: Sequence[Span]) -> list[torch.Tensor | None]:
        """Features [num_positions, width] of each span, on the CPU or the GPU that has them; None where they could not be had after all (counted)."""
        found: list[torch.Tensor | None] = [None] * len(spans)
        by_way: dict[str, list[int]] = {}
        for index, span in enumerate(spans):
            sequence = self._sequences[span.seq_id]
            assert span.first + span.num_positions <= sequence.num_positions, f"{span} of {sequence.num_positions} positions"
            by_way.setdefault(sequence.way.name, []).append(index)
        for name, indices in by_way.items():
            for index, features in zip(indices, self._read(self._ways[name], [spans[index] for index in indices]), strict=True):
                found[index] = features
        return found

    def close(self, seq_id: int) -> None:
        """Forgets a sequence, if it was known."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            sequence.way.num_sequences -= 1

    def stop(self) -> None:
        """Lets go of all verifiers."""
        for way in self._ways.values():
            way.path.close()
        self._ways.clear()
        self._sequences.clear()

    def _read(self, way: _Way, spans: Sequence[Span]) -> list[torch.Tensor | None]:
        if way.rests_until_s > self._clock():
            self.counts.failed(way.label, len(spans))
            return [None] * len(spans)
        started_ns = time.time_ns()
        sequences = [self._sequences[span.seq_id] for span in spans]
        located = [
            Located(one.handle.place, one.handle.generation, one.block_ids, span.first, span.num_positions)
            for one, span in zip(sequences, spans, strict=True)
        ]
        try:
            found = way.path.read(located)
        except SpecwireError as error:
            way.rests_until_s = self._clock() + _PAUSE_S
            self.counts.failed(way.label, len(spans))
            logger.warning("no features of %s: %s; drafts go on without them, the next attempt is in %g s", way.name, error, _PAUSE_S)
            return [None] * len(spans)
        there = [one.nbytes for one in found if one is not None]
        self.counts.read(way.label, len(there), len(found) - len(there), sum(there), started_ns, time.time_ns())
        return found

    def _way(self, handle: FeatureHandle) -> _Way:
        """The best way to the verifier of a handle, which is the first one of a generation."""
        for name in filter(None, (handle.source if self._uses_memory else "", handle.address)):
            if name in self._ways:
                return self._ways[name]
            if name == handle.source and name not in self._unshared and (way := self._share(name)) is not None:
                return way
        return self._add(GRPC, handle.address, self._connect(handle.address, handle.server_name))

    def _share(self, name: str) -> _Way | None:
        try:
            path = SharedFeatures(name, self._source, self._device)
        except SpecwireError as error:
            self.counts.num_unshared += 1
            self._unshared.add(name)
            logger.warning("features of a verifier come over gRPC: %s", error)
            return None
        logger.info("reading features of %s out of the verifier's memory", self._source.name)
        return self._add(MEMORY, name, path)

    def _add(self, label: str, name: str, path: FeaturePath) -> _Way:
        """A verifier that is started anew has another name: what nobody uses is let go of when something new comes."""
        for unused in [way for way in self._ways.values() if not way.num_sequences]:
            unused.path.close()
            del self._ways[unused.name]
        way = self._ways[name] = _Way(label, name, path)
        return way
