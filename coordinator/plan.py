"""What a step will do: its sequences, their token budgets and their drafts. Decodes come first, then prefill chunks."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import mixed
from .chunks import share_chunks
from .draft_counts import count_drafts
from .halves import half_of, most_in_flight, take_half
from .sequence import Sequence
from .slots import Slot

if TYPE_CHECKING:
    from .choice import Choice
    from .draft_slot import Opening
    from .lane import Lane
    from .trace_records import StepTrace

_CHUNK_SHARE = 4
"""Drafts leave one part in so many of a round's tokens to prefill chunks, where any wait."""


@dataclass(slots=True)
class StepTimes:
    """When a step did what, in time.monotonic_ns(); 0 = not (yet). Drafts are waited for between asked and drafted.

    traces: of rows whose requests want spans of this step, if there are any.
    """

    planned_ns: int
    asked_ns: int = 0
    drafted_ns: int = 0
    sent_ns: int = 0
    answered_ns: int = 0
    traces: "list[StepTrace] | None" = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Args:
        decodes: sequences that get a decode row.
        num_drafts: most drafts of each.
        chunks: slots that get a prefill row, with their token budgets.
        ahead: slots that are opened before their first chunk: the answer says what of them the prefix cache has, so that chunks take no more of
            a round's tokens than they compute.
        num_speculative_tokens, opening: see `DraftCounts`.
        is_drafting: some sequence may get drafts: the step waits for all rounds before it, and the next step waits for this one; with half batches,
            for those that hold rows of its sequences.
        times: filled in as the step goes on.
        choice: of adaptive verification, filled in likewise; None without it, and where nobody could be asked.
        adaptive_rows: that the choice is about; None = all.
    """

    decodes: list[Sequence]
    num_drafts: list[int]
    chunks: list[tuple[Slot, int]]
    ahead: list[Slot]
    num_speculative_tokens: int
    opening: "Opening"
    is_drafting: bool
    times: StepTimes
    choice: "Choice | None" = None
    adaptive_rows: list[int] | None = None


def make_plan(lane: "Lane") -> Plan | None:
    """The lane's next step, or None if there is nothing to send before something new has come.

    With drafts, rounds go one by one, or two by two with half batches. Without, up to W of them are in flight, and rows follow tokens that are not
    known here yet.
    """
    if lane.is_draining or len(lane.in_flight) >= most_in_flight(lane):
        return None
    times = StepTimes(time.monotonic_ns())
    lane.admission.fill(lane)
    if lane.pins.may_pin:
        lane.pins.pin()
    decodes, prefills, num_awaited = _candidates(lane)
    num_decoding = len(decodes) + num_awaited
    is_decoding, is_halving = num_decoding > 0, 0 < lane.half_batches_from <= num_decoding
    num_rows = min(len(decodes), half_of(num_decoding)) if is_halving else len(decodes)
    batch_size = max(1, num_decoding if is_halving else len(decodes))
    most = _most_drafts(lane.max_num_batched_tokens, num_rows, has_prefills=bool(prefills))
    counts = count_drafts(lane, decodes, batch_size, most, lambda: _chunks(lane, decodes, prefills, 0, is_decoding=is_decoding))
    rows, num_drafts, choice = decodes, counts.num_drafts, counts.choice
    is_drafting = any(num_drafts)
    if is_halving and is_drafting:
        rows, num_drafts = take_half(decodes, num_drafts, num_rows)
        is_drafting = any(num_drafts)
    elif lane.in_flight and (is_drafting or lane.is_lockstep) and not is_halving:
        return None
    chunks = _chunks(lane, rows, prefills, sum(num_drafts), is_decoding=is_decoding)
    if not (rows or chunks or lane.closes or any(link.has_mail(counts.opening) for link in lane.links)):
        if lane.policy is not None and not lane.in_flight:
            lane.policy.idle()
        return None
    adaptive_rows = None
    if choice is not None and counts.is_mixed:
        adaptive_rows = mixed.settle(choice, lane, rows, num_drafts, chunks)
    elif choice is not None:
        choice.settle(rows, chunks, is_drafting=is_drafting)
    ahead = _open_ahead(lane, prefills, chunks) if len(chunks) < len(prefills) else []
    return Plan(rows, num_drafts, chunks, ahead, counts.num_speculative_tokens, counts.opening, is_drafting, times, choice, adaptive_rows)


def trim(plan: Plan, drafts: list[list[int]]) -> list[list[int]]:
    """The drafts worth verifying: with dynamic K, as many as the plan gave each sequence; with adaptive verification, the best ones of all."""
    if plan.choice is not None and plan.is_drafting:
        return plan.choice.keep(plan, drafts) if plan.adaptive_rows is None else mixed.keep(plan, drafts)
    return [draft[:most] if len(draft) > most else draft for draft, most in zip(drafts, plan.num_drafts, strict=True)]


def _most_drafts(num_batched_tokens: int, num_rows: int, *, has_prefills: bool) -> int:
    """Drafts that a round has room for in each of so many decode rows; where any prefills wait, it keeps a part for their chunks."""
    reserve = num_batched_tokens // _CHUNK_SHARE if has_prefills else 0
    return max(0, (num_batched_tokens - reserve) // max(1, num_rows) - 1)


def _chunks(lane: "Lane", decodes: list[Sequence], prefills: list[Slot], num_draft_tokens: int, *, is_decoding: bool) -> list[tuple[Slot, int]]:
    """The prefill chunks beside these decode rows and so many drafts in all."""
    budget = lane.max_num_batched_tokens - len(decodes) - num_draft_tokens
    if prefills and is_decoding:
        budget = lane.chunk_limit.num_tokens(budget, decodes, num_draft_tokens)
    return share_chunks(prefills, budget)


def _open_ahead(lane: "Lane", prefills: list[Slot], chunks: list[tuple[Slot, int]]) -> list[Slot]:
    """The first ones that are neither open nor have a chunk. A round opens about as many tokens as it may compute, so that it fits into a message,
    and since opening takes the verifier's time, too."""
    with_chunk = {slot for slot, _ in chunks}
    ahead, budget = [], lane.max_num_batched_tokens - sum([slot.num_known_tokens for slot in with_chunk if not slot.is_open])
    for slot in prefills:
        if not slot.is_open and slot not in with_chunk:
            budget -= slot.num_known_tokens
            if budget < 0:
                break
            ahead.append(slot)
    return ahead


def _candidates(lane: "Lane") -> tuple[list[Sequence], list[Slot], int]:
    """Sequences that can get a decode row, and slots that can get a prefill row, in the order of their placement; and how many decode in a step
    after this one, since a row in flight must be answered first."""
    decodes, prefills, num_awaited = [], [], 0
    for sequence in lane.running:
        slot = sequence.slot
        assert slot is not None, "a running sequence has a slot"
        if sequence.is_paused:
            continue
        if slot.has_failed:
            if slot.num_in_flight:
                num_awaited += not slot.is_prefilling
                continue
            slot.resume()
        if slot.num_ahead:
            if len(sequence.token_ids) + slot.num_ahead < sequence.max_len:
                if sequence.runs_ahead:
                    decodes.append(sequence)
                else:
                    num_awaited += 1
        elif not slot.is_prefilling:
            if slot.num_in_flight == slot.num_chunks:
                decodes.append(sequence)
            else:  # its drafts are being verified
                num_awaited += 1
        elif slot.num_remaining_tokens > 0:
            prefills.append(slot)
    return decodes, prefills, num_awaited
