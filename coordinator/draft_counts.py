"""How many drafts a step asks for: by the schedule, a canary's schedule, or what adaptive verification chooses, and by what each row can take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import mixed
from .draft_slot import OPEN_ALL, OPEN_NONE, Opening, least_judged

if TYPE_CHECKING:
    from .choice import Choice
    from .draft_slot import DraftSlot
    from .lane import Lane
    from .sequence import Sequence
    from .slots import Slot


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What drafters may be asked for in one step.

    Args:
        num_drafts: most of each decode row.
        num_speculative_tokens: K of the step.
        opening: sequences that each drafter is told of, so that it can draft for them when it is asked to.
        choice: of adaptive verification; None without it, and where nobody could be asked.
        is_mixed: the choice is about one kind of rows alone: the canary's, or the others.
    """

    num_drafts: list[int]
    num_speculative_tokens: int
    opening: Opening
    choice: "Choice | None" = None
    is_mixed: bool = False


def count_drafts(
    lane: "Lane", decodes: "list[Sequence]", batch_size: int, most: int, plain_chunks: "Callable[[], list[tuple[Slot, int]]]"
) -> DraftCounts:
    """For each of these rows how many drafts may be asked for.

    Args:
        batch_size: sequences by which schedules go.
        most: drafts of a row that the round has room for.
        plain_chunks: prefill chunks of the step if it had no drafts.
    """
    base_k = canary_k = min(lane.schedule.choose(batch_size, lane.next_round), most)
    if lane.canary is not None:
        canary_k = min(lane.canary[1].choose(batch_size, lane.next_round), most)
    k, policy = max(base_k, canary_k), lane.policy
    opening = OPEN_ALL if k else OPEN_NONE
    ceilings: list[int] = []
    if lane.canary is not None:
        canary = lane.canary[0]
        ceilings = [canary_k if sequence.request.variant is canary else base_k for sequence in decodes]
    choice, is_mixed = None, policy is not None and lane.is_canary_adaptive is not None
    if policy is None or not k:
        num_drafts = _rows_drafts(lane, decodes, k, None)
    elif is_mixed:
        own = mixed.adaptive_rows(lane, decodes)
        rows, around = mixed.beside(decodes, own, ceilings, plain_chunks())
        choice = policy.choose(lane, rows, around, canary_k if lane.is_canary_adaptive else base_k)
        num_drafts = _rows_drafts(lane, decodes, k, None)
        if choice is not None:
            for row, number in zip(own, _rows_drafts(lane, rows, choice.request.num_drafts, choice), strict=True):
                num_drafts[row] = number
        opening = policy.opening_beside(rows, choice)
    else:
        choice, ceiling = policy.choose(lane, decodes, plain_chunks(), k), k
        k = k if choice is None else choice.request.num_drafts
        num_drafts = _rows_drafts(lane, decodes, k, choice)
        opening = policy.opening(lane, decodes, choice, ceiling)
    if ceilings:
        num_drafts = list(map(min, num_drafts, ceilings))
    return DraftCounts(num_drafts, k, opening, choice, is_mixed)


def _rows_drafts(lane: "Lane", decodes: "list[Sequence]", k: int, choice: "Choice | None") -> list[int]:
    """Drafts to ask for: K, or what adaptive verification chose for such sequences, shrunk to what the sequence, its context and its drafter can
    take."""
    if not k or not any(link.is_usable for link in lane.links):
        return [0] * len(decodes)
    num_drafts, next_round = [], lane.next_round
    probed = None if choice is None or not choice.request.is_lone else set(_probed(decodes, choice.request.num_asked[0]))
    graded = choice if choice is not None and choice.request.by_grade else None
    for sequence in decodes:
        place = sequence.draft_slot
        if place is None or place.ask_round > next_round or not place.link.is_usable:
            num_drafts.append(0)
            continue
        if probed is not None and place not in probed:
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


def _probed(decodes: "list[Sequence]", number: int) -> "list[DraftSlot]":
    """Places that a probe which stands alone asks for drafts."""
    return least_judged([place for sequence in decodes if (place := sequence.draft_slot) is not None and place.is_in_step], number)
