"""Which sequences' features can be read, by which blocks, and what drafters are told of it.

The verifier's threads keep the books, one at a time; `read` may be called from any thread, beside them. A sequence is taken out of the books, and
its generation word cleared, before its blocks are free: whoever finds it in the books after copying has copied what was its own.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specwire.engine.block_manager import BlockManager
from specwire.engine.features.pages import FeaturePages, HeadPages
from specwire.engine.features.pool import token_slots
from specwire.errors import InvalidArgumentError
from specwire.messages import FeatureHandle, FeaturePull, FeatureRange, PulledFeatures, RowStatus

from .plan import Segment
from .slots import Slot

_GENERATION_BITS = 62
"""Random numbers below 2^62 do not meet, can't be guessed by who was not told, and are int64 on the wire."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """What drafters may know of a slot."""

    place: int
    generation: int
    block_ids: list[int] = field(default_factory=list)  # only appended to
    num_positions: int = 0  # features of committed tokens that are computed


class FeatureBooks:
    """The open sequences of one verifier.

    Args:
        pages: of all heads.
        max_num_seqs: most sequences at a time.
        address: where drafters reach this verifier; empty = where the coordinator does.

    Attributes:
        num_pulled: ranges that were asked for over gRPC, by what became of them; num_pulled_bytes: of the answers.
    """

    def __init__(self, pages: FeaturePages, max_num_seqs: int, address: str = "") -> None:
        self.num_pulled: Counter[RowStatus] = Counter()
        self.num_pulled_bytes = 0
        self._pages = pages
        self._address = address
        self._heads = {head.source.hash: head for head in pages.heads}
        self._words = np.zeros(max_num_seqs, dtype=np.uint64) if pages.pool is None else pages.pool.words
        self._source = "" if pages.pool is None else pages.pool.name
        assert len(self._words) >= max_num_seqs, f"{len(self._words)} places for {max_num_seqs} sequences"
        self._free_places = list(range(max_num_seqs - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}  # by slot
        self._by_generation: dict[int, _Sequence] = {}
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def waits(self) -> bool:
        """Whether `read` waits for a device: not for an event loop, then."""
        return self._stream is not None

    @property
    def _device(self) -> torch.device:
        return self._pages.heads[0].pages.device

    def open(self, slot: Slot) -> None:
        """A new sequence; nobody is told of it before its first positions are computed."""
        sequence = _Sequence(self._free_places.pop(), 1 + secrets.randbits(_GENERATION_BITS))
        self._sequences[slot.slot] = self._by_generation[sequence.generation] = sequence
        self._words[sequence.place] = sequence.generation

    def close(self, slot: Slot) -> None:
        """Its end, before its blocks are free."""
        sequence = self._sequences.pop(slot.slot)
        del self._by_generation[sequence.generation]
        self._words[sequence.place] = 0
        self._free_places.append(sequence.place)

    def handles(self, session: int, segments: Iterable[Segment], blocks: BlockManager) -> list[FeatureHandle]:
        """What is new of these segments of a round that was read: blocks, and how far a prefill has come. Of decoding sequences a drafter
        knows itself how far they are."""
        handles = []
        for segment in segments:
            slot = segment.slot
            if slot.is_closed or slot.error:
                continue
            sequence = self._sequences[slot.slot]
            sequence.num_positions = slot.num_computed_tokens
            is_first, table = not sequence.block_ids, blocks.block_table(slot.slot)
            new_block_ids = table[len(sequence.block_ids) :]
            if new_block_ids or not segment.samples:
                sequence.block_ids += new_block_ids
                handles.append(
                    FeatureHandle(
                        session, slot.slot, slot.epoch, "", self._source if is_first else "", new_block_ids, 0, sequence.num_positions,
                        sequence.generation, sequence.place, self._address if is_first else "",
                    )
                )  # fmt: skip
        return handles

    def read(self, pull: FeaturePull, max_bytes: int) -> PulledFeatures:
        """The features of some ranges, from any thread.

        Raises:
            InvalidArgumentError: no such set, or more than max_bytes.
        """
        head = self._heads.get(pull.feature_set_hash)
        if head is None:
            kept = ", ".join(f"{head.source.name} ({number})" for number, head in self._heads.items())
            raise InvalidArgumentError(f"features {pull.feature_set_hash} are not kept here, but those of {kept}; start the verifier with that head")
        num_bytes = sum(max(0, one.num_positions) for one in pull.ranges) * head.source.width * head.source.dtype.itemsize
        if num_bytes > max_bytes:
            raise InvalidArgumentError(
                f"{len(pull.ranges)} ranges have {num_bytes} bytes of features, but an answer may have {max_bytes}; ask for fewer"
            )
        found = [(one, self._find(one)) for one in pull.ranges]
        copied = [(one, sequence) for one, sequence in found if isinstance(sequence, _Sequence)]
        data = self._copy(head, copied)
        ends = np.cumsum([one.num_positions for one, _ in copied], dtype=np.int64)
        is_good = [self._by_generation.get(one.generation) is sequence for one, sequence in copied]
        if not all(is_good):
            data = np.concatenate([part for part, good in zip(np.split(data, ends[:-1]), is_good, strict=True) if good] or [data[:0]])
        outcomes = iter(is_good)
        statuses = [status if isinstance(status, RowStatus) else RowStatus.OK if next(outcomes) else RowStatus.STALE for _, status in found]
        self.num_pulled.update(statuses)
        self.num_pulled_bytes += data.nbytes
        return PulledFeatures(statuses, data.tobytes())

    def _find(self, one: FeatureRange) -> "_Sequence | RowStatus":
        sequence = self._by_generation.get(one.generation)
        if sequence is None:
            return RowStatus.STALE
        if one.first < 0 or one.num_positions < 1 or one.first + one.num_positions > sequence.num_positions:
            return RowStatus.BAD
        return sequence

    def _copy(self, head: HeadPages, ranges: Sequence[tuple[FeatureRange, _Sequence]]) -> np.ndarray:
        """uint8 [positions of all ranges, bytes of a token]."""
        spans = [(sequence.block_ids, one.first, one.num_positions) for one, sequence in ranges]
        rows = torch.from_numpy(token_slots(spans, self._pages.block_size))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            flat = head.pages.view(-1, head.source.width)
            copied: np.ndarray = flat.index_select(0, rows.to(flat.device)).view(torch.uint8).cpu().numpy()
        return copied
