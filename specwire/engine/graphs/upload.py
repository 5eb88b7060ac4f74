"""The one message that the host sends to the device a round: int32 numbers, packed without gaps.

header | rows (ROW numbers each) | opened slots (OPEN each) | block-table changes (CHANGE each) | token ids
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.sampling.philox import key_to_int64
from specwire.engine.sampling.slot import SlotSampling

HEADER = 4
"""Numbers of rows, opened slots, block-table changes and tokens."""
ROW = 5
"""slot, number of tokens, position of the first, rows of logits (1 + drafts), flags."""
OPEN = 5
"""slot, temperature's bits, the key's low and high word, choice."""
CHANGE = 3
"""slot, index in its block table, block."""
FROM_DEVICE = 1
"""Flag: the first token is the slot's last one, as the device knows it."""
SAMPLES = 2
"""Flag: the row emits tokens; without it the last token's logits only show whether its numbers are good."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """Consecutive tokens of one slot.

    Args:
        slot: opened before, and of no other row of the round.
        start_position: of the first token; KV of all earlier positions is computed, or will be by the rounds launched before.
        token_ids: known tokens, then drafts; the first one is ignored if from_device.
        num_drafts: how many of them are drafts.
        block_table: the sequence's blocks in order, covering all tokens; only grows between an open and the next.
        sampling: has seen all tokens before the first that this row samples, as far as its parameters look at them.
        samples: whether the row reaches the end of the known tokens, and so emits.
        from_device: the first token is the one that the slot's last row sampled.
    """

    slot: int
    start_position: int
    token_ids: Sequence[int]
    num_drafts: int
    block_table: Sequence[int]
    sampling: SlotSampling
    samples: bool = True
    from_device: bool = False

    @property
    def first_index(self) -> int:
        """Absolute index of the first token that the row samples."""
        return self.start_position + len(self.token_ids) - self.num_drafts


class Uploads:
    """Packs rounds into page-locked buffers, and knows what the device has of each slot already.

    Args:
        limits: of the rounds.
        max_blocks: of a sequence.
        num_buffers: rounds in flight; a buffer is reused when its round has finished.
        device: where uploads go.
    """

    def __init__(self, limits: RoundLimits, max_blocks: int, num_buffers: int, device: torch.device) -> None:
        self._max_blocks = max_blocks
        num_slots = limits.max_num_seqs
        num_tokens = max(limits.max_num_batched_tokens, limits.max_graph_tokens)
        size = HEADER + num_slots * (ROW + OPEN + CHANGE * max_blocks) + num_tokens
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(num_buffers)]
        self._num_sent_blocks = [0] * num_slots
        self._opens: dict[int, tuple[int, ...]] = {}
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)

    def open(self, slot: int, sampling: SlotSampling) -> None:
        """From the next round on the slot has these parameters and an empty block table."""
        params = sampling.params
        (bits,) = struct.unpack("<i", struct.pack("<f", 0.0 if params.is_greedy else params.temperature))
        key = key_to_int64(sampling.key)
        low = (key & 0xFFFFFFFF) - ((key & 0x80000000) << 1)
        self._opens[slot] = (slot, bits, low, key >> 32, sampling.choice)
        self._num_sent_blocks[slot] = 0

    def send(self, rows: Sequence[RoundRow], buffer: int) -> int:
        """Starts the upload of a round; returns how many numbers it has."""
        changes: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        packed: list[tuple[int, ...]] = []
        for row in rows:
            known, table = self._num_sent_blocks[row.slot], row.block_table
            assert len(table) <= self._max_blocks, f"slot {row.slot} has {len(table)} blocks, the device {self._max_blocks}"
            if len(table) > known:
                changes.extend((row.slot, index, table[index]) for index in range(known, len(table)))
                self._num_sent_blocks[row.slot] = len(table)
            tokens.extend(row.token_ids)
            flags = row.from_device * FROM_DEVICE + row.samples * SAMPLES
            packed.append((row.slot, len(row.token_ids), row.start_position, 1 + row.num_drafts, flags))
        opens = list(self._opens.values())
        self._opens.clear()
        target = self._buffers[buffer]
        array = target.numpy()
        array[:HEADER] = len(rows), len(opens), len(changes), len(tokens)
        end = HEADER
        for part in (packed, opens, changes, tokens):
            if part:
                flat = np.array(part, dtype=np.int32).reshape(-1)
                array[end : end + len(flat)] = flat
                end += len(flat)
        self.on_device[:end].copy_(target[:end], non_blocking=True)
        return end
