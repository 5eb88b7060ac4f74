"""Logits as the processors leave them, where a kernel reads them: in memory they stay raw. In Triton; the twin is `row_ops_torch.process`."""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs import asks as flags
from specwire.engine.graphs.tensors import RoundInputs, SlotState

ADJUSTS, PENALISES, STOPS, PROCESSES, ASKED = (
    tl.constexpr(number) for number in (flags.ADJUSTS, flags.PENALISES, flags.STOPS, flags.PROCESSES, flags.ASKED)
)


def read_by_process(state: SlotState, inputs: RoundInputs) -> tuple[torch.Tensor, ...]:
    """What `process` reads of rows and slots."""
    return (
        inputs.requests, inputs.slots, inputs.logit_starts, inputs.logit_rows, inputs.indices, inputs.token_ids,
        state.asked, state.adjustments, state.words,
    )  # fmt: skip


@triton.jit
def process(z, column, real, row, asks, about, vocab_size, SEEN: tl.constexpr, STOP: tl.constexpr):
    """`row_ops_torch.process` of some columns; -inf in any step stays, so masks may come in any order."""
    requests, slots, logit_starts, logit_rows, indices, token_ids, asked, adjustments, words = about
    raw = z
    request = tl.load(requests + row)
    slot = tl.load(slots + request).to(tl.int64)
    numbers = asked + slot * ASKED
    if (asks & ADJUSTS) != 0:
        z += tl.load(adjustments + slot * vocab_size + column, real, 0.0)
    is_below_min = ((asks & STOPS) != 0) & (tl.load(indices + row) < tl.load(numbers + 7))
    penalises = (asks & PENALISES) != 0
    if penalises | is_below_min:
        word = tl.load(words + slot * vocab_size + column, real, 0).to(tl.int32)
        if penalises:
            count = word & (STOP - 1)
            last_draft = token_ids + tl.load(logit_rows + row)
            for back in range(row - tl.load(logit_starts + request)):
                count += (column == tl.load(last_draft - back)).to(tl.int32)
            repetition = tl.load(numbers + 4).to(tl.float32, bitcast=True)
            penalised = tl.where(z > 0.0, tl.div_rn(z, repetition), z * repetition)
            z = tl.where(((word & SEEN) != 0) | (count > 0), penalised, z)
            z -= tl.load(numbers + 5).to(tl.float32, bitcast=True) * count.to(tl.float32)
            z -= tl.where(count > 0, tl.load(numbers + 6).to(tl.float32, bitcast=True), 0.0)
        if is_below_min:
            z = tl.where((word & STOP) != 0, float("-inf"), z)
    return tl.where(raw < float("inf"), z, raw)


@triton.jit
def load_z(source, column, row, asks, about, vocab_size, SEEN: tl.constexpr, STOP: tl.constexpr):
    """Processed logits; +inf for a NaN, so that a bad row ends as one with infinity."""
    real = column < vocab_size
    z = tl.load(source + column, real, float("-inf"))
    z = tl.where(z == z, z, float("inf"))
    if (asks & PROCESSES) != 0:
        z = process(z, column, real, row, asks, about, vocab_size, SEEN, STOP)
    return z
