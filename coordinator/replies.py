"""What is used of a drafter's reply: rows that are fresh and sane. Nothing that a drafter sends is forwarded unchecked."""

from itertools import chain
from typing import TYPE_CHECKING

from specwire.messages import DraftRowResult, RowStatus

from .draft_slot import DraftSlot

if TYPE_CHECKING:
    from .link import DraftLink

_MAX_FAILURES = 3
_OK = RowStatus.OK


def take_rows(link: "DraftLink", rows: list[DraftRowResult], *, is_asked: bool) -> None:
    """Keeps the drafts of rows that are fresh and sane; rows that nobody asked for may have K drafts."""
    lane, slots = link.lane, link.slots
    counters, num_asked, vocab_size = lane.counters, lane.num_speculative_tokens, lane.vocab_size
    all_are_sane = _are_sane(rows, vocab_size)
    for row in rows:
        status, index, epoch, base_len, drafts, confidences, error = row
        place = slots.get(index)
        if place is None or place.epoch != epoch or base_len != len(place.sequence.token_ids):
            counters.num_stale_drafts += 1
        elif status is not _OK:
            _fail(link, place, status, error)
        elif len(drafts) > (place.num_asked if is_asked else num_asked) or not (all_are_sane or _are_sane([row], vocab_size)):
            counters.num_garbage_drafts += 1
            counters.fallbacks["garbage"] += 1
            address = link.drafter.address
            lane.log.warning(f"garbage {address}", "drafter %s sent %d drafts that no drafter should send; dropped", address, len(drafts))
            place.base_len, place.drafts, place.confidences = base_len, [], []  # an answer that is worth nothing, which is worth knowing
        else:
            place.base_len = base_len
            place.drafts = drafts
            place.confidences = confidences
            place.num_failures = 0


def _are_sane(rows: list[DraftRowResult], vocab_size: int) -> bool:
    """Whether all drafts are in the vocabulary and the confidences may be what they should: a NaN makes their sum one, too."""
    drafts = list(chain.from_iterable([row.draft_tokens for row in rows]))
    if not drafts:
        return True
    scores = chain.from_iterable([row.confidences for row in rows])
    return min(drafts) >= 0 and max(drafts) < vocab_size and 0 <= sum(scores) <= len(drafts)


def _fail(link: "DraftLink", place: DraftSlot, status: RowStatus, error: str) -> None:
    """A slot without drafts: it catches up, or the drafter can't go on with it: opened anew, tried elsewhere, or given up."""
    sequence, lane = place.sequence, link.lane
    if status is RowStatus.CATCHING_UP:
        lane.counters.fallbacks["catching_up"] += 1
        return
    lane.counters.fallbacks[f"drafter_{status.name.lower()}"] += 1
    lane.log.warning(
        f"draft row {status}", "drafter %s answered %s for a sequence of request %s: %s",
        link.drafter.address, status.name, sequence.request.label, error or "no reason",
    )  # fmt: skip
    link.close_slot(place, makes_room=status is not RowStatus.OUT_OF_BLOCKS)
    if status is RowStatus.STALE and place.num_failures < _MAX_FAILURES:
        link.take(sequence, place.num_failures + 1)
    elif status is RowStatus.OUT_OF_BLOCKS:
        lane.look_for_drafter(sequence, soon=False)
