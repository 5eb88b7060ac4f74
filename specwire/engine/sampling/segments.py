"""One round's sampling and acceptance over ragged rows of logits. It reads sequences and never changes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from specwire.engine.sampling.acceptance import is_accepted
from specwire.engine.sampling.logprobs import raw_logprobs
from specwire.engine.sampling.philox import Stream, uniforms
from specwire.engine.sampling.processors import process_rows
from specwire.engine.sampling.ratio import check_drafts
from specwire.engine.sampling.sampler import SampleMargins, SamplerRows, sample_greedy, sample_rows
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import TokenLogprobs
from specwire.proposals import RowProposals, join_rows, one_hot

_CHEAP_TOP_K = 128
"""Up to this top_k, sampling all rows of a segment at once costs less than sampling them one after the other."""


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """The rows of logits of one sequence: row j samples token `first_index + j`, given draft_ids[:j].

    Args:
        slot: has seen all tokens before `first_index`, as far as its parameters look at them.
        first_index: absolute index of the token that row 0 samples (an L-token prompt's first output has index L).
        draft_ids: in [0, V).
        allowed_mask: [1 + num_drafts, V] bool, True where a grammar allows the token; None = everywhere.
        proposals: what the drafts were drawn from, for a slot that tests their ratio; None = nothing else could have been drafted.
    """

    slot: SlotSampling
    first_index: int
    draft_ids: Sequence[int] = ()
    allowed_mask: Tensor | None = None
    proposals: RowProposals | None = None

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_ids)


class SegmentTokens(NamedTuple):
    """What a round emits for one sequence: the accepted drafts and the next token.

    Args:
        num_accepted: accepted drafts.
        token_ids: num_accepted + 1 ids; if is_bad, only the drafts accepted before the bad row.
        is_bad: a row that was to emit a token had a NaN or +inf logit, or no token left to sample.
        logprobs: one entry a token, iff the request asked for them.
        margins: one entry a token, iff the caller asked for them.
    """

    num_accepted: int
    token_ids: tuple[int, ...]
    is_bad: bool
    logprobs: list[TokenLogprobs] | None
    margins: tuple[SampleMargins, ...] | None


def sample_segments(logits: Tensor, segments: Sequence[SegmentRows], *, margins: bool = False) -> list[SegmentTokens]:
    """Sample the target's tokens and accept the leading drafts of each segment.

    Row j is sampled as if the drafts before it had been emitted, and used only if they were.

    Args:
        logits: [R, V] float32, raw, R = sum of num_rows in the order of the segments. Not modified.
        margins: also report how close each emitted token was to being another one.
    """
    starts = [0, *accumulate(segment.num_rows for segment in segments)]
    assert starts[-1] == len(logits), f"{len(logits)} rows of logits for segments of {starts[-1]} rows"
    positions = [(segment, j) for segment in segments for j in range(segment.num_rows)]
    processed, raw_is_bad = _process(logits, segments, starts)
    draws = _synthetic_draws(segments, positions, logits.device)

    samples: dict[int, _RowSample] = {}
    num_accepted = [0] * len(segments)
    unfinished = list(range(len(segments)))
    while unfinished:  # once, unless rows that cost much wait until the drafts before them are accepted
        wave = [row for i in unfinished for row in _rows_to_sample(segments[i], starts[i], num_accepted[i])]
        samples |= _sample(processed, raw_is_bad, wave, [positions[row] for row in wave], margins)
        for i in unfinished:
            num_accepted[i] = _count_accepted(segments[i], starts[i], num_accepted[i], samples, draws)
        unfinished = [i for i in unfinished if starts[i] + num_accepted[i] not in samples]

    results = []
    for segment, start, num in zip(segments, starts, num_accepted, strict=False):
        emitted = [samples[start + j] for j in range(num + 1)]
        is_bad = emitted[-1].is_bad
        token_ids = (*segment.draft_ids[:num],) if is_bad else (*segment.draft_ids[:num], emitted[-1].token_id)
        row_margins = tuple(sample.margins for sample in emitted[: len(token_ids)] if sample.margins is not None) if margins else None
        results.append(SegmentTokens(num, token_ids, is_bad, None, row_margins))
    return _with_logprobs(results, logits, segments, starts)


@dataclass(frozen=True, slots=True)
class _RowSample:
    """The target's token at one row."""

    token_id: int
    is_bad: bool
    margins: SampleMargins | None


def _process(logits: Tensor, segments: Sequence[SegmentRows], starts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Processed logits, and which raw rows are bad ([R] bool) where processing can hide it; the logits themselves if nobody asks."""
    asking = [i for i, segment in enumerate(segments) if segment.allowed_mask is not None or segment.slot.processes_at(segment.first_index)]
    if not asking:
        return logits, None
    processed = logits.clone()
    for i in asking:
        segment = segments[i]
        process_rows(processed[starts[i] : starts[i + 1]], segment.slot, segment.first_index, segment.draft_ids, segment.allowed_mask)
    best = logits.amax(dim=1)
    return processed, best.isnan() | best.isposinf()


def _rows_to_sample(segment: SegmentRows, start: int, num_accepted: int) -> range:
    """The rows to sample next: all that are left where they cost little together, else only the first."""
    params = segment.slot.params
    is_cheap = params.is_greedy or 0 < params.top_k <= _CHEAP_TOP_K
    return range(start + num_accepted, start + (segment.num_rows if is_cheap else num_accepted + 1))


def _sample(
    processed: Tensor, raw_is_bad: Tensor | None, rows: Sequence[int], positions: Sequence[tuple[SegmentRows, int]], margins: bool
) -> dict[int, _RowSample]:
    """Sample some rows; positions are their (segment, row in it)."""
    tested = [i for i, (segment, j) in enumerate(positions) if segment.slot.tests_ratio and j < len(segment.draft_ids)]
    if tested:
        assert not margins, f"margins of {len(tested)} rows that test a ratio"
        kept = set(tested)
        others = [i for i in range(len(rows)) if i not in kept]
        checked = _check_drafts(processed, raw_is_bad, [rows[i] for i in tested], [positions[i] for i in tested])
        return checked | _sample(processed, raw_is_bad, [rows[i] for i in others], [positions[i] for i in others], margins) if others else checked
    if len(rows) < len(processed):
        index = torch.tensor(rows, device=processed.device)
        processed, raw_is_bad = processed[index], None if raw_is_bad is None else raw_is_bad[index]
    if margins or not all(segment.slot.params.is_greedy for segment, _ in positions):
        sampled = sample_rows(processed, _sampler_rows(positions, processed.device), margins=margins)
    else:
        sampled = sample_greedy(processed)
    is_bad = sampled.is_bad if raw_is_bad is None else sampled.is_bad | raw_is_bad
    row_margins = sampled.margins if margins else [None] * len(rows)
    samples = zip(sampled.token_ids.tolist(), is_bad.tolist(), row_margins, strict=True)
    return {row: _RowSample(*sample) for row, sample in zip(rows, samples, strict=True)}


def _check_drafts(
    processed: Tensor, raw_is_bad: Tensor | None, rows: Sequence[int], positions: Sequence[tuple[SegmentRows, int]]
) -> dict[int, _RowSample]:
    """Tokens of rows that test a ratio: the draft, or what stands in its place."""
    device, index = processed.device, torch.tensor(rows, device=processed.device)
    drafts = [segment.draft_ids[j] for segment, j in positions]
    candidate_ids, candidate_probs = _candidates(positions)
    token_ids, is_bad = check_drafts(
        processed[index], _sampler_rows(positions, device), torch.tensor(drafts, device=device), candidate_ids.to(device), candidate_probs.to(device)
    )
    if raw_is_bad is not None:
        is_bad = is_bad | raw_is_bad[index]
    return {row: _RowSample(token_id, bad, None) for row, token_id, bad in zip(rows, token_ids.tolist(), is_bad.tolist(), strict=True)}


def _candidates(positions: Sequence[tuple[SegmentRows, int]]) -> tuple[Tensor, Tensor]:
    """What the draft of each row was drawn from: ids [R, m] int64 and probabilities [R, m] float32, padded to the most."""
    parts = [one_hot(segment.draft_ids[j : j + 1]) if segment.proposals is None else segment.proposals.only(j) for segment, j in positions]
    joined = join_rows(parts)
    return torch.from_numpy(joined.token_ids).long(), torch.from_numpy(joined.probs)


def _sampler_rows(positions: Sequence[tuple[SegmentRows, int]], device: torch.device) -> SamplerRows:
    return SamplerRows.build(
        params=[segment.slot.params for segment, _ in positions],
        keys=[segment.slot.key for segment, _ in positions],
        indices=[segment.first_index + j for segment, j in positions],
        choices=[segment.slot.choice for segment, _ in positions],
        device=device,
    )


def _synthetic_draws(segments: Sequence[SegmentRows], positions: Sequence[tuple[SegmentRows, int]], device: torch.device) -> list[float]:
    """The uniform of each row's token index, [R]; zeros if no segment looks at them."""
    if all(segment.slot.conditional_rates is None for segment in segments):
        return [0.0] * len(positions)
    rows = _sampler_rows(positions, device)
    return uniforms(rows.keys, rows.indices, rows.choices, Stream.SYNTHETIC).tolist()


def _count_accepted(segment: SegmentRows, start: int, num_accepted: int, samples: Mapping[int, _RowSample], draws: Sequence[float]) -> int:
    """Go on accepting from num_accepted, as far as rows are sampled and good."""
    rates = segment.slot.conditional_rates
    for position in range(num_accepted, len(segment.draft_ids)):
        sample = samples.get(start + position)
        if sample is None or sample.is_bad:
            return position
        if not is_accepted(segment.draft_ids[position], sample.token_id, position, rates, draws[start + position]):
            return position
    return len(segment.draft_ids)


def _with_logprobs(results: Sequence[SegmentTokens], logits: Tensor, segments: Sequence[SegmentRows], starts: Sequence[int]) -> list[SegmentTokens]:
    """Add log-probabilities of the emitted tokens to the segments that ask for them."""
    nums_top = {i: segment.slot.params.logprobs for i, segment in enumerate(segments) if segment.slot.params.logprobs is not None}
    if not nums_top:
        return list(results)
    rows = [starts[i] + j for i in nums_top for j in range(len(results[i].token_ids))]
    token_ids = [token_id for i in nums_top for token_id in results[i].token_ids]
    nums = [num for i, num in nums_top.items() for _ in results[i].token_ids]
    entries = iter(raw_logprobs(logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)], token_ids, nums))
    return [result._replace(logprobs=list(islice(entries, len(result.token_ids)))) if i in nums_top else result for i, result in enumerate(results)]
