"""Steps in which the canary's rows have adaptive verification and the others have not, or the other way round.

The policy chooses for its own rows; the others are beside them as prefill chunks are: their tokens cost time, and nothing about them is to be chosen.
"""

import dataclasses
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .choice import Choice
    from .lane import Lane
    from .plan import Plan
    from .sequence import Sequence
    from .slots import Slot

    Chunks = list[tuple[Slot, int]]


def adaptive_rows(lane: "Lane", decodes: "list[Sequence]") -> list[int]:
    """Where those are that the policy chooses for."""
    assert lane.canary is not None, f"lane {lane.index} has rows of two kinds without a canary"
    canary, wanted = lane.canary[0], lane.is_canary_adaptive
    return [row for row, sequence in enumerate(decodes) if (sequence.request.variant is canary) == wanted]


def beside(decodes: "list[Sequence]", rows: list[int], num_drafts: Rows[int], chunks: "Chunks") -> "tuple[list[Sequence], Chunks]":
    """The policy's sequences, and what is beside them.

    Args:
        rows: of the policy.
        num_drafts: of each row; those of the policy's do not matter.
        chunks: of prefills.
    """
    own = set(rows)
    others = []
    for row, sequence in enumerate(decodes):
        if row not in own:
            assert sequence.slot is not None, "a decoding sequence has a slot"
            others.append((sequence.slot, 1 + num_drafts[row]))
    return [decodes[row] for row in rows], chunks + others


def settle(choice: "Choice", lane: "Lane", decodes: "list[Sequence]", num_drafts: list[int], chunks: "Chunks") -> list[int]:
    """As `Choice.settle`; returns where the policy's rows are."""
    rows = adaptive_rows(lane, decodes)
    is_drafting = any(num_drafts)
    choice.settle(*beside(decodes, rows, num_drafts, chunks), is_drafting=is_drafting)
    if is_drafting and not choice.request.num_drafts:
        choice.is_observed = False  # it takes as long as the others' drafts do, which says nothing of a step without any
    return rows


def keep(plan: "Plan", drafts: list[list[int]]) -> list[list[int]]:
    """As `Choice.keep` for the policy's rows; the others have the plan's number."""
    choice, rows = plan.choice, plan.adaptive_rows
    assert choice is not None, "a step of two kinds of rows has a choice"
    assert rows is not None, "it knows where they are"
    kept = [draft[:most] if len(draft) > most else draft for draft, most in zip(drafts, plan.num_drafts, strict=True)]
    own = dataclasses.replace(plan, decodes=[plan.decodes[row] for row in rows], num_drafts=[plan.num_drafts[row] for row in rows])
    for row, draft in zip(rows, choice.keep(own, [drafts[row] for row in rows]), strict=True):
        kept[row] = draft
    choice.rows = [rows[index] for index in choice.rows]
    return kept
