"""The one message that the host sends to the device a round: int32 numbers, packed without gaps.

header | rows (ROW numbers each) | opened slots (`open_size` each) | block-table changes (CHANGE each) | token ids
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from specwire.engine.graphs.asks import ASKED, ON_HOST, REPORTS, acceptance_thresholds, asked_numbers
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.sampling.philox import key_to_int64
from specwire.engine.sampling.slot import SlotSampling

HEADER = 4
"""Numbers of rows, opened slots, block-table changes and tokens."""
ROW = 5
"""slot, number of tokens, position of the first, rows of logits (1 + drafts), flags."""
OPEN = 5 + ASKED
"""slot, temperature's bits, the key's low and high word, choice, what it asks for; behind these, low and high word of each acceptance threshold."""
CHANGE = 3
"""slot, index in its block table, block."""
FROM_DEVICE = 1
"""Flag: the first token is the slot's last one, as the device knows it."""
_FEW_ROWS = 16
"""Rounds of so many rows are packed number by number, which takes a third of the time that arrays take there."""
SAMPLES = 2
"""Flag: the row emits tokens; without it the last token's logits only show whether its numbers are good."""


def open_size(num_thresholds: int) -> int:
    """Numbers of an opened slot."""
    return OPEN + 2 * num_thresholds


class RoundRow(NamedTuple):
    """Consecutive tokens of one slot.

    Args:
        slot: opened before, and of no other row of the round.
        start_position: of the first token; KV of all earlier positions is computed, or will be by the rounds launched before.
        token_ids: known tokens, then drafts; the first one is ignored if from_device.
        num_drafts: how many of them are drafts.
        block_table: the sequence's blocks in order, covering all tokens; only grows between an open and the next.
        sampling: what the slot was opened with. Only for a slot that the host samples it has to have seen all tokens before the first that
            this row samples.
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


@dataclass(frozen=True, slots=True)
class SentRound:
    """What was packed, as the host needs it to run the round."""

    size: int  # numbers of the message
    num_tokens: int
    num_logit_rows: int
    num_sampling: int  # rows that sample
    longest: int  # tokens of the longest row
    on_host: Sequence[int] = ()  # rows that the host samples
    reporting: Sequence[int] = ()  # rows whose log-probabilities are wanted


class Uploads:
    """Packs rounds into page-locked buffers, and knows what the device has of each slot already.

    Args:
        limits: of the rounds.
        max_blocks: of a sequence.
        num_buffers: rounds in flight; a buffer is reused when its round has finished.
        device: where uploads go.
    """

    def __init__(self, limits: RoundLimits, max_blocks: int, num_buffers: int, device: torch.device) -> None:
        self._limits, self._max_blocks = limits, max_blocks
        num_slots = limits.max_num_seqs
        num_tokens = max(limits.max_num_batched_tokens, limits.max_graph_tokens)
        size = HEADER + num_slots * (ROW + open_size(limits.max_num_draft_tokens) + CHANGE * max_blocks) + num_tokens
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(num_buffers)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._num_sent_blocks = np.zeros(num_slots, dtype=np.int32)
        self._flags = np.zeros(num_slots, dtype=np.int32)
        self._opens: dict[int, tuple[int, ...]] = {}
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)

    def open(self, slot: int, sampling: SlotSampling) -> int:
        """From the next round on the slot has these parameters and an empty block table. Returns the flags of what it asks for."""
        params, num_thresholds = sampling.params, self._limits.max_num_draft_tokens
        (bits,) = struct.unpack("<i", struct.pack("<f", 0.0 if params.is_greedy else params.temperature))
        asked = asked_numbers(sampling)
        thresholds = acceptance_thresholds(sampling.conditional_rates or (), num_thresholds)
        words = (_words(number) for number in (key_to_int64(sampling.key), *thresholds))
        key, *rates = words
        self._opens[slot] = (slot, bits, *key, sampling.choice, *asked, *chain.from_iterable(rates))
        self._num_sent_blocks[slot], self._flags[slot] = 0, asked[0]
        return asked[0]

    def send(self, rows: Sequence[RoundRow], buffer: int) -> SentRound:
        """Starts the upload of a round."""
        array = self._arrays[buffer]
        sent = self._pack_few(array, rows) or self._pack(array, rows)
        self._opens.clear()
        self.on_device[: sent.size].copy_(self._buffers[buffer][: sent.size], non_blocking=True)
        return sent

    def _pack(self, array: np.ndarray, rows: Sequence[RoundRow]) -> SentRound:
        """Writes the message of any round."""
        end = HEADER + len(rows) * ROW
        records = array[HEADER:end].reshape(-1, ROW)
        token_ids, tables = self._pack_rows(records, rows) if rows else ((), ())
        changes = self._changes(records[:, 0], tables)
        num_tokens = int(records[:, 1].sum())
        array[:HEADER] = len(rows), len(self._opens), sum(map(len, changes)) // CHANGE, num_tokens
        for part in (*self._opens.values(), *changes):
            array[end : end + len(part)] = part
            end += len(part)
        array[end : end + num_tokens] = np.fromiter(chain.from_iterable(token_ids), np.int32, num_tokens)
        end += num_tokens
        samples = (records[:, 4] & SAMPLES) != 0
        flags = self._flags[records[:, 0]] * samples
        on_host, reporting = ((flags & flag).nonzero()[0].tolist() for flag in (ON_HOST, REPORTS))
        longest, num_logit_rows = int(records[:, 1].max(initial=0)), int(records[:, 3].sum())
        return SentRound(end, num_tokens, num_logit_rows, int(np.count_nonzero(samples)), longest, on_host, reporting)

    def _pack_few(self, array: np.ndarray, rows: Sequence[RoundRow]) -> SentRound | None:
        """As `_pack`; None for many rows, and for wrong ones, about which `_pack` has something to say."""
        if not 0 < len(rows) <= _FEW_ROWS:
            return None
        records: list[int] = []
        changes: list[int] = []
        tokens: list[int] = []
        lengths: list[tuple[int, int]] = []
        num_logit_rows = num_sampling = longest = 0
        on_host, reporting = [], []
        for index, (slot, start, token_ids, num_drafts, table, _, samples, from_device) in enumerate(rows):
            num_tokens, num_blocks, known = len(token_ids), len(table), int(self._num_sent_blocks[slot])
            most_drafts = min(num_tokens - 1, self._limits.max_num_draft_tokens) if samples else 0
            if not 0 <= num_drafts <= most_drafts or start < 0 or (from_device and num_tokens > 1) or num_blocks > self._max_blocks:
                return None
            records += (slot, num_tokens, start, num_drafts + 1, from_device * FROM_DEVICE + samples * SAMPLES)
            for number in range(known, num_blocks):
                changes += (slot, number, table[number])
            tokens += token_ids
            lengths.append((slot, max(known, num_blocks)))
            num_logit_rows += num_drafts + 1
            num_sampling += samples
            longest = max(longest, num_tokens)
            if samples and (flags := int(self._flags[slot])):
                on_host += [index] if flags & ON_HOST else []
                reporting += [index] if flags & REPORTS else []
        if len(dict(lengths)) < len(rows):
            return None
        for slot, num_blocks in lengths:
            self._num_sent_blocks[slot] = num_blocks
        opened = chain.from_iterable(self._opens.values())
        message = [len(rows), len(self._opens), len(changes) // CHANGE, len(tokens), *records, *opened, *changes, *tokens]
        array[: len(message)] = message
        return SentRound(len(message), len(tokens), num_logit_rows, num_sampling, longest, on_host, reporting)

    def _pack_rows(self, records: np.ndarray, rows: Sequence[RoundRow]) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """Writes the rows' records [R, ROW]; returns their token ids and block tables."""
        slots, starts, token_ids, nums_drafts, tables, _, samples, from_device = zip(*rows, strict=True)
        records[:, 0] = slots
        records[:, 1] = np.fromiter(map(len, token_ids), np.int32, len(rows))
        records[:, 2] = starts
        records[:, 3] = nums_drafts
        records[:, 4] = np.frombuffer(bytes(from_device), np.uint8) * FROM_DEVICE + np.frombuffer(bytes(samples), np.uint8) * SAMPLES
        self._check(*records.T)
        records[:, 3] += 1
        return token_ids, tables

    def _check(self, slots: np.ndarray, query_lens: np.ndarray, starts: np.ndarray, drafts: np.ndarray, flags: np.ndarray) -> None:
        assert len(set(slots.tolist())) == len(slots), f"several rows of one slot: {slots.tolist()}"
        wrong = (drafts < 0) | (drafts > np.minimum(query_lens - 1, self._limits.max_num_draft_tokens)) | (starts < 0)
        wrong |= ((flags & FROM_DEVICE) != 0) & (query_lens > 1)  # only a row's first token can be from the device
        wrong |= ((flags & SAMPLES) == 0) & (drafts > 0)
        columns = (slots, query_lens, starts, drafts, flags)
        assert not wrong.any(), f"slot, tokens, position, drafts, flags of bad rows: {[column[wrong].tolist() for column in columns]}"

    def _changes(self, slots: np.ndarray, tables: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """What the device does not have of the block tables, CHANGE numbers an entry."""
        lengths = np.fromiter(map(len, tables), np.int32, len(tables))
        assert lengths.max(initial=0) <= self._max_blocks, f"{lengths.tolist()} blocks, the device has place for {self._max_blocks}"
        known = self._num_sent_blocks[slots]
        changes = []
        for row in (lengths > known).nonzero()[0].tolist():
            begin, end, slot = int(known[row]), int(lengths[row]), int(slots[row])
            part = np.empty((end - begin, CHANGE), dtype=np.int32)
            part[:, 0], part[:, 1], part[:, 2] = slot, range(begin, end), tables[row][begin:end]
            changes.append(part.reshape(-1))
            self._num_sent_blocks[slot] = end
        return changes


def _words(number: int) -> tuple[int, int]:
    """Low and high half of a signed 64-bit number, as int32."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1), number >> 32
