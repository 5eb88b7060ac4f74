"""The one message that the host sends to the device for a call of drafting: int32 numbers, packed without gaps.

header | rows (ROW numbers each) | block-table changes (CHANGE each) | token ids
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from specwire.engine.sampling.philox import key_to_int64

HEADER = 3
"""Numbers of rows, block-table changes and tokens."""
ROW = 8
"""slot, number of tokens, position of the first, drafts, temperature's bits, the key's low and high word, choice."""
CHANGE = 3
"""slot, index in its block table, block."""


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the drafts of a sequence are drawn.

    Args:
        temperature: 0 is greedy.
        key: unsigned 64-bit key of the noise.
        choice: which of the request's n.
    """

    temperature: float
    key: int
    choice: int


class DraftRow(NamedTuple):
    """The next committed tokens of a sequence, and how many drafts are to follow them.

    Args:
        slot: opened before, and of no other row of the call.
        start_position: of the first token; KV of all earlier positions is computed.
        token_ids: at least one; with drafts, up to the sequence's last one.
        block_table: the sequence's blocks in order, covering the tokens and all drafts but the last; only grows between an open and the next.
        num_drafts: 0 = only the tokens' KV is wanted.
        features: for a head: [n, width], of positions features_start .. features_start + n - 1, the tokens' among them.
    """

    slot: int
    start_position: int
    token_ids: Sequence[int]
    block_table: Sequence[int]
    num_drafts: int = 0
    features: torch.Tensor | None = None
    features_start: int = 0


class DraftUploads:
    """Packs calls into one page-locked buffer, and knows which blocks of each slot the device has already.

    Args:
        num_slots: sequences.
        max_blocks: of a sequence.
        max_num_tokens: of a call.
        device: where uploads go.
    """

    def __init__(self, num_slots: int, max_blocks: int, max_num_tokens: int, device: torch.device) -> None:
        size = HEADER + num_slots * (ROW + CHANGE * max_blocks) + max_num_tokens
        self._buffer = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array = self._buffer.numpy()
        self._max_blocks = max_blocks
        self._num_sent_blocks = [0] * num_slots
        self._sampling = np.zeros((num_slots, 4), dtype=np.int32)
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """From the next call on the slot has these parameters and an empty block table."""
        assert 0 <= slot < len(self._num_sent_blocks), f"slot {slot} of {len(self._num_sent_blocks)}"
        (bits,) = struct.unpack("<i", struct.pack("<f", sampling.temperature))
        key = key_to_int64(sampling.key)
        low = (key & 0xFFFFFFFF) - ((key & 0x80000000) << 1)
        self._sampling[slot] = bits, low, key >> 32, sampling.choice
        self._num_sent_blocks[slot] = 0

    def send(self, rows: Sequence[DraftRow]) -> int:
        """Starts the upload of a call, when the one before has finished; returns how many numbers it has."""
        changes: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        heads: list[int] = []
        num_sent = self._num_sent_blocks
        for slot, start, token_ids, table, num_drafts, _, _ in rows:
            known, num_blocks = num_sent[slot], len(table)
            if num_blocks > known:
                assert num_blocks <= self._max_blocks, f"slot {slot} has {num_blocks} blocks, the device {self._max_blocks}"
                changes.extend([(slot, index, table[index]) for index in range(known, num_blocks)])
                num_sent[slot] = num_blocks
            heads += slot, len(token_ids), start, num_drafts
            tokens += token_ids
        array = self._array
        array[:HEADER] = len(rows), len(changes), len(tokens)
        end = HEADER + len(rows) * ROW
        if rows:
            records = array[HEADER:end].reshape(len(rows), ROW)
            records[:, :4] = np.array(heads, dtype=np.int32).reshape(len(rows), 4)
            records[:, 4:] = self._sampling[records[:, 0]]
        for part in (changes, tokens):
            if part:
                flat = np.array(part, dtype=np.int32).reshape(-1)
                array[end : end + len(flat)] = flat
                end += len(flat)
        self.on_device[:end].copy_(self._buffer[:end], non_blocking=True)
        return end
