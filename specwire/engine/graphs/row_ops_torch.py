"""The torch twins of the kernels in `row_ops`, for any device; they wait for it. Filters and log-probabilities are the sampler's own."""

import torch

from specwire.engine.graphs.asks import ADJUSTS, FILTERS, PENALISES, PROCESSES, REPORTS, STOPS
from specwire.engine.graphs.tensors import DEAD, RoundInputs, SlotState
from specwire.engine.kernels.gumbel_argmax_torch import gumbel_argmax
from specwire.engine.sampling.logprobs import raw_logprobs
from specwire.engine.sampling.philox import Stream
from specwire.engine.sampling.support import Filters, filtered_support

_TOP_K, _TOP_P, _LOG_MIN_P, _REPETITION, _FREQUENCY, _PRESENCE, _MIN_INDEX, _NUM_TOP = range(1, 9)
"""Columns of `SlotState.asked`."""


def process(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> torch.Tensor:
    """Logits after allowed tokens, bias, penalties and bad words; a row with a NaN or +inf keeps it.

    Args:
        logits: [L, V] float32, raw. Not modified.
        state: of all slots.
        inputs: as `prepare` left them.

    Returns:
        [L, V] float32; the logits themselves if no row asks.
    """
    rows = _asking(inputs, PROCESSES)
    if not len(rows):
        return logits
    asks, slots = inputs.asks[rows, None], _slots(inputs, rows)
    asked, words = state.asked[slots], state.words[slots].int()  # [n, ASKED], [n, V]
    raw = logits[rows]
    z = torch.where((asks & ADJUSTS) != 0, raw + state.adjustments[slots], raw)

    counts = words & (state.stop_bit - 1)
    num_before = (rows - inputs.logit_starts[inputs.requests[rows].long()])[:, None]
    for back in range(int(num_before.max())):
        draft_ids = inputs.token_ids[(inputs.logit_rows[rows] - back).clamp_(min=0), None]
        counts.scatter_add_(1, draft_ids, (back < num_before).int())
    repetition, frequency, presence = (_floats(asked, column) for column in (_REPETITION, _FREQUENCY, _PRESENCE))
    is_seen = ((words & state.seen_bit) != 0) | (counts > 0)
    penalised = torch.where(is_seen, torch.where(z > 0, z / repetition, z * repetition), z)
    penalised = penalised - frequency * counts - presence * (counts > 0)
    z = torch.where((asks & PENALISES) != 0, penalised, z)

    is_below_min = ((asks & STOPS) != 0) & (inputs.indices[rows, None] < asked[:, _MIN_INDEX, None])
    z = z.masked_fill(is_below_min & ((words & state.stop_bit) != 0), -torch.inf)
    return logits.index_copy(0, rows, torch.where(raw < torch.inf, z, raw))


def find_cuts(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> None:
    """Where the support of each row that asks for filters ends: tokens above `cut_values`, and those equal to it up to `cut_ids`.

    Args:
        logits: [L, V] float32, raw.
        state: of all slots.
        inputs: as `prepare` left them; cuts are written. Those of rows that don't ask, or have no token to sample, are undefined.
    """
    rows = _asking(inputs, FILTERS)
    if not len(rows):
        return
    z = process(logits, state, inputs)[rows]
    best = z.amax(1)
    rows, z = rows[best.isfinite()], z[best.isfinite()]
    if not len(rows):
        return
    asked = state.asked[_slots(inputs, rows)]
    top_ps, min_ps = _floats(asked, _TOP_P)[:, 0].double(), _floats(asked, _LOG_MIN_P)[:, 0].double().exp()
    support = filtered_support(z, Filters(inputs.temperatures[rows], asked[:, _TOP_K].long(), top_ps, min_ps))
    last = (support.sizes - 1)[:, None]
    inputs.cut_values[rows] = support.logits.gather(1, last)[:, 0]
    inputs.cut_ids[rows] = support.token_ids.gather(1, last)[:, 0].int()


def sample_targets(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> torch.Tensor:
    """The target's token of each row: argmax of z + T * g over the row's support.

    Args:
        logits: [L, V] float32, raw.
        state: of all slots.
        inputs: as `find_cuts` left them.

    Returns:
        [L] int64; -1 for a bad row: a NaN, +inf, or no token left to sample.
    """
    z = process(logits, state, inputs)
    rows = _asking(inputs, FILTERS)
    if len(rows):
        values, cuts = z[rows], inputs.cut_values[rows, None]
        token_ids = torch.arange(z.shape[1], device=z.device)
        kept = (values > cuts) | ((values == cuts) & (token_ids <= inputs.cut_ids[rows, None])) | ~(values < torch.inf)
        z = z.index_copy(0, rows, values.masked_fill(~kept, -torch.inf))
    return gumbel_argmax(z, inputs.temperatures, inputs.keys, inputs.indices, inputs.choices, Stream.TARGET)


def report_logprobs(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> None:
    """Log-probabilities of emitted tokens, and of the likeliest ones, for rows that ask.

    Args:
        logits: [L, V] float32, raw.
        state: of all slots.
        inputs: as `accept` left them. For rows that ask and emit `logprobs` gets the emitted token's log-probability, then those of
            `logprob_ids`, by falling value, then rising id; nothing else is written.
    """
    rows = _asking(inputs, REPORTS)
    if not len(rows):
        return
    requests = inputs.requests[rows].long()
    column = rows - inputs.logit_starts[requests]
    first = inputs.results[requests, 0]
    emits = (first != DEAD) & (column < torch.where(first < 0, -1 - first, first + 1))
    rows, requests, column = rows[emits], requests[emits], column[emits]
    token_ids = inputs.results[requests, 1 + column]
    nums_top = state.asked[_slots(inputs, rows), _NUM_TOP]
    entries = raw_logprobs(logits[rows], token_ids.tolist(), nums_top.tolist())
    for row, entry in zip(rows.tolist(), entries, strict=True):
        values = [entry.sampled, *(value for _, value in entry.top)]
        inputs.logprobs[row, : len(values)] = torch.tensor(values, device=logits.device)
        inputs.logprob_ids[row, : len(entry.top)] = torch.tensor([token_id for token_id, _ in entry.top], dtype=torch.int32, device=logits.device)


def _asking(inputs: RoundInputs, flags: int) -> torch.Tensor:
    return (inputs.asks & flags).nonzero().squeeze(1)


def _slots(inputs: RoundInputs, rows: torch.Tensor) -> torch.Tensor:
    return inputs.slots[inputs.requests[rows].long()].long()


def _floats(asked: torch.Tensor, column: int) -> torch.Tensor:
    """[n, 1] float32."""
    return asked[:, column, None].contiguous().view(torch.float32)
