"""What a step will do: its sequences, their token budgets and their drafts. Decodes come first, then prefill chunks."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import mixed
from .chunks import share_chunks
from .halves import half_of, most_in_flight, take_half
from .sequence import Sequence
from .slots import Slot

if TYPE_CHECKING:
    from .choice import Choice
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
        num_speculative_tokens: K of this step.
        may_open: drafters are told of new sequences, so that they can draft for them when they are asked to.
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
    may_open: bool
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
    num_decoding, num_rows, num_batched_tokens = len(decodes) + num_awaited, len(decodes), lane.max_num_batched_tokens
    is_decoding, is_halving = num_decoding > 0, 0 < lane.half_batches_from <= num_decoding
    if is_halving:
        num_rows = min(num_rows, half_of(num_decoding))
    batch_size = max(1, num_decoding if is_halving else len(decodes))
    k = base_k = lane.schedule.choose(batch_size, lane.next_round)
    canary_k = 0 if lane.canary is None else lane.canary[1].choose(batch_size, lane.next_round)
    k = max(k, canary_k)
    if decodes:
        reserve = num_batched_tokens // _CHUNK_SHARE if prefills else 0
        k = max(0, min(k, (num_batched_tokens - reserve) // num_rows - 1))
    may_open, choice, is_mixed = k > 0, None, lane.is_canary_adaptive is not None and lane.policy is not None
    ceilings: list[int] = []
    if lane.canary is not None:
        canary = lane.canary[0]
        ceilings = [min(k, canary_k if row.request.variant is canary else base_k) for row in decodes]
    if may_open and lane.policy is not None:
        rows, most, around = decodes, k, _chunks(lane, decodes, prefills, 0, is_decoding=is_decoding)
        if is_mixed:
            rows, around = mixed.beside(decodes, mixed.adaptive_rows(lane, decodes), ceilings, around)
            most = min(k, canary_k if lane.is_canary_adaptive else base_k)
        choice = lane.policy.choose(lane, rows, around, most)
        if not is_mixed:
            k = k if choice is None else choice.request.num_drafts
    num_drafts = _num_drafts(lane, decodes, k, None if is_mixed else choice)
    if is_mixed and choice is not None:
        own = mixed.adaptive_rows(lane, decodes)
        for row, number in zip(own, _num_drafts(lane, [decodes[row] for row in own], choice.request.num_drafts, choice), strict=True):
            num_drafts[row] = number
    if ceilings:
        num_drafts = list(map(min, num_drafts, ceilings))
    is_drafting = any(num_drafts)
    if is_halving and is_drafting:
        decodes, num_drafts = take_half(decodes, num_drafts, num_rows)
        is_drafting = any(num_drafts)
    elif lane.in_flight and (is_drafting or lane.is_lockstep) and not is_halving:
        return None
    chunks = _chunks(lane, decodes, prefills, sum(num_drafts), is_decoding=is_decoding)
    if not (decodes or chunks or lane.closes or any(link.has_mail(may_open=may_open) for link in lane.links)):
        if lane.policy is not None and not lane.in_flight:
            lane.policy.idle()
        return None
    own_rows = None
    if choice is not None and is_mixed:
        own_rows = mixed.settle(choice, lane, decodes, num_drafts, chunks)
    elif choice is not None:
        choice.settle(decodes, chunks, is_drafting=is_drafting)
    ahead = _open_ahead(lane, prefills, chunks) if len(chunks) < len(prefills) else []
    return Plan(decodes, num_drafts, chunks, ahead, k, may_open, is_drafting, times, choice, own_rows)


def trim(plan: Plan, drafts: list[list[int]]) -> list[list[int]]:
    """The drafts worth verifying: with dynamic K, as many as the plan gave each sequence; with adaptive verification, the best ones of all."""
    if plan.choice is not None and plan.is_drafting:
        return plan.choice.keep(plan, drafts) if plan.adaptive_rows is None else mixed.keep(plan, drafts)
    return [draft[:most] if len(draft) > most else draft for draft, most in zip(drafts, plan.num_drafts, strict=True)]


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


def _num_drafts(lane: "Lane", decodes: list[Sequence], k: int, choice: "Choice | None") -> list[int]:
    """Drafts to ask for: K, or what adaptive verification chose for such sequences, shrunk to what the sequence, its context and its drafter can
    take."""
    if not k or not any(link.is_usable for link in lane.links):
        return [0] * len(decodes)
    num_drafts, next_round = [], lane.next_round
    graded = choice if choice is not None and choice.request.by_grade else None
    for sequence in decodes:
        place = sequence.draft_slot
        if place is None or place.ask_round > next_round or not place.link.is_usable:
            num_drafts.append(0)
            continue
        if graded is not None:
            k = graded.num_drafts(place)
        drafter, length = place.link.drafter, len(sequence.token_ids)
        # Nearly always K itself: cheaper to see so than to take the smallest of all.
        if k <= sequence.max_drafts and length + k < sequence.max_len and k <= drafter.max_drafts and length + k <= drafter.window:
            num_drafts.append(k)
        else:
            num_drafts.append(max(0, min(k, sequence.max_drafts, sequence.max_len - length - 1, drafter.max_drafts, drafter.window - length)))
            if length >= drafter.window:
                place.link.close_slot(place)
                lane.pins.look(sequence)
    return num_drafts
