"""The coordinator's step: plan, propose, trim, verify, commit. Nothing may be added to it: what a step does belongs to one of the five.
Propose and verify must stay free of effects on sequences, and whatever can wait (a peer's connection, a client) must not be awaited here."""

from .commit import commit
from .drafters import propose
from .lane import Lane
from .plan import Plan, make_plan, trim
from .slots import decode_rows


async def step(lane: Lane) -> None:
    """Sends at most one round to the lane's verifier and commits every answer that has come."""
    plan = make_plan(lane)
    if plan is None:
        await lane.something_new()
    else:
        drafts = await propose(lane, plan)
        drafts = trim(plan, drafts)
        verify(lane, plan, drafts)
    for round_, result in lane.take_answers():
        commit(lane, round_, result)


def verify(lane: Lane, plan: Plan, drafts: list[list[int]]) -> None:
    """Sends the plan as one round: a decode row with its drafts or a prefill chunk for each sequence that is still there."""
    round_ = lane.next_round
    opened, slots, kept = [], [], []
    for sequence, draft in zip(plan.decodes, drafts, strict=True):
        slot = sequence.slot
        if slot is not None and not slot.is_closed:
            slots.append(slot)
            kept.append(draft)
    rows = decode_rows(slots, kept, round_)
    for slot, budget in plan.chunks:
        if not slot.is_closed:
            if not slot.is_open:
                opened.append(slot)
            rows.append(slot.chunk_row(round_, budget))
            slots.append(slot)
    if rows:
        opened += [slot for slot in plan.ahead if not slot.is_closed]
    if rows or lane.closes:
        lane.is_lockstep = plan.is_drafting
        lane.launch(opened, rows, slots, plan)
