"""One round's sampling and acceptance over ragged rows of logits. It reads sequences and never changes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from specwire.engine.sampling.acceptance import count_strict, count_synthetic
from specwire.engine.sampling.logprobs import TokenLogprobs, raw_logprobs
from specwire.engine.sampling.philox import Stream, uniforms
from specwire.engine.sampling.processors import process_rows
from specwire.engine.sampling.sampler import SampledRows, SampleMargins, SamplerRows, sample_greedy, sample_rows
from specwire.engine.sampling.slot import SlotSampling


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """The rows of logits of one sequence: row j samples token `first_index + j`, given draft_ids[:j].

    Args:
        slot: has seen all tokens before `first_index`, as far as its parameters look at them.
        first_index: absolute index of the token that row 0 samples (an L-token prompt's first output has index L).
        draft_ids: in [0, V).
        allowed_mask: [1 + num_drafts, V] bool, True where a grammar allows the token; None = everywhere.
    """

    slot: SlotSampling
    first_index: int
    draft_ids: Sequence[int] = ()
    allowed_mask: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_ids)


@dataclass(frozen=True, slots=True)
class SegmentTokens:
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
    logprobs: tuple[TokenLogprobs, ...] | None
    margins: tuple[SampleMargins, ...] | None


def sample_segments(logits: Tensor, segments: Sequence[SegmentRows], *, margins: bool = False) -> list[SegmentTokens]:
    """Sample the target's token at every row, then accept the leading drafts of each segment.

    The rows of all segments are sampled at once: row j assumes the drafts before it, and is only used if they were accepted.

    Args:
        logits: [R, V] float32, raw, R = sum of num_rows in the order of the segments. Not modified.
        margins: also report how close each emitted token was to being another one.
    """
    starts = [0, *accumulate(segment.num_rows for segment in segments)]
    assert starts[-1] == len(logits), f"{len(logits)} rows of logits for segments of {starts[-1]} rows"
    sampled = _sample_targets(logits, segments, starts, margins)
    targets, bad_rows = sampled.token_ids.tolist(), sampled.is_bad.tolist()
    draws = _synthetic_draws(segments, starts, logits.device)

    emitted: list[tuple[int, ...]] = []
    is_bad: list[bool] = []
    for segment, start, end in zip(segments, starts, starts[1:], strict=False):
        token_ids = _accept(segment, targets[start:end], draws[start:end])
        good = token_ids[: bad_rows.index(True, start) - start] if True in bad_rows[start : start + len(token_ids)] else token_ids
        emitted.append(good)
        is_bad.append(len(good) < len(token_ids))

    logprobs = _logprobs(logits, segments, starts, emitted)
    return [
        SegmentTokens(
            num_accepted=len(token_ids) - (not bad),
            token_ids=token_ids,
            is_bad=bad,
            logprobs=logprobs.get(i),
            margins=sampled.margins(start, start + len(token_ids)) if margins else None,
        )
        for i, (start, token_ids, bad) in enumerate(zip(starts, emitted, is_bad, strict=False))
    ]


def _sample_targets(logits: Tensor, segments: Sequence[SegmentRows], starts: Sequence[int], margins: bool) -> SampledRows:
    """The target's token at every row."""
    processed = [i for i, segment in enumerate(segments) if segment.allowed_mask is not None or segment.slot.processes_at(segment.first_index)]
    rows = logits.clone() if processed else logits
    for i in processed:
        segment = segments[i]
        process_rows(rows[starts[i] : starts[i + 1]], segment.slot, segment.first_index, segment.draft_ids, segment.allowed_mask)
    if not margins and all(segment.slot.params.is_greedy for segment in segments):
        sampled = sample_greedy(rows)
    else:
        sampled = sample_rows(rows, _sampler_rows(segments, logits.device), margins=margins)
    if processed:  # a mask may hide a NaN, but not make the row trustworthy
        raw = logits.amax(dim=1)
        sampled.is_bad.logical_or_(raw.isnan() | raw.isposinf())
    return sampled


def _sampler_rows(segments: Sequence[SegmentRows], device: torch.device) -> SamplerRows:
    rows = [(segment, j) for segment in segments for j in range(segment.num_rows)]
    return SamplerRows.build(
        params=[segment.slot.params for segment, _ in rows],
        keys=[segment.slot.key for segment, _ in rows],
        indices=[segment.first_index + j for segment, j in rows],
        choices=[segment.slot.choice for segment, _ in rows],
        device=device,
    )


def _synthetic_draws(segments: Sequence[SegmentRows], starts: Sequence[int], device: torch.device) -> list[float]:
    """The uniform of each row's token index, [R]; empty if no segment is synthetic."""
    if all(segment.slot.synthetic_rates is None for segment in segments):
        return []
    rows = _sampler_rows(segments, device)
    return uniforms(rows.keys, rows.indices, rows.choices, Stream.SYNTHETIC).tolist()


def _accept(segment: SegmentRows, targets: Sequence[int], draws: Sequence[float]) -> tuple[int, ...]:
    """The accepted drafts and the next token."""
    rates = segment.slot.synthetic_rates
    num_drafts = len(segment.draft_ids)
    num_accepted = count_strict(targets, segment.draft_ids) if rates is None else count_synthetic(draws, rates, num_drafts)
    return (*segment.draft_ids[:num_accepted], targets[num_accepted])


def _logprobs(
    logits: Tensor, segments: Sequence[SegmentRows], starts: Sequence[int], emitted: Sequence[Sequence[int]]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Log-probabilities of the emitted tokens, by segment, of those that ask."""
    nums_top = {i: segment.slot.params.logprobs for i, segment in enumerate(segments) if segment.slot.params.logprobs is not None}
    rows = [starts[i] + j for i in nums_top for j in range(len(emitted[i]))]
    if not rows:
        return dict.fromkeys(nums_top, ())
    entries = iter(
        raw_logprobs(
            logits[torch.tensor(rows, device=logits.device)],
            [token_id for i in nums_top for token_id in emitted[i]],
            [num for i, num in nums_top.items() for _ in emitted[i]],
        )
    )
    return {i: tuple(islice(entries, len(emitted[i]))) for i in nums_top}
