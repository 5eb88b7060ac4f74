"""The canary's beginning, changes and ends, on all lanes at once."""

import dataclasses
from typing import TYPE_CHECKING

from specwire.canary_config import ADAPTIVE
from specwire.errors import FailedPreconditionError
from specwire.messages import CanaryAction, VariantStatus
from specwire.policy.capacity import EngineDescription
from specwire.policy.schedule import describe_clipping
from specwire.speculative_config import read_keys

from .calibration import check_acceptance, need_calibration

if TYPE_CHECKING:
    from .admission import Admission
    from .lane import Lane


def set_canary(admission: "Admission", action: CanaryAction, share: float, config: str) -> tuple[VariantStatus, ...]:
    """Does what is asked for with the canary, on all lanes from their next steps on. Returns what base and canary came to so far.

    Raises:
        InvalidArgumentError, UnsupportedError, FailedPreconditionError: it can't be done.
    """
    variants, engine = admission.variants, admission.description
    if engine is None:
        raise FailedPreconditionError("no verifier was reached yet, so that it is not known what a canary may be; wait until health is SERVING")
    if action is CanaryAction.START:
        check_adaptive(admission, config, engine)
        descriptions = [link.drafter.description for lane in admission.lanes for link in lane.links if link.is_usable]
        variants.start(share, config, engine, {description.method for description in descriptions if description is not None})
        if variants.is_adaptive:
            need_calibration(admission, engine)
    elif action is CanaryAction.SET_SHARE:
        variants.set_share(share)
    elif action is CanaryAction.PROMOTE:
        table = variants.promote()
        schedule = variants.speculative.num_speculative_tokens_per_batch_size
        reasons = [reason for reason in engine.reasons if not reason.startswith("[")]
        reasons += describe_clipping(schedule, engine.num_speculative_tokens, engine.max_num_seqs)
        engine = admission.description = dataclasses.replace(engine, schedule=table, reasons=tuple(reasons))
    else:
        variants.roll_back()
    for lane in admission.lanes:
        variants.equip(lane, engine.schedule)
        if lane.is_connected:
            lane.use_policy()
        _pin_anew(lane)
        lane.wake()
    return variants.last_status()


def check_adaptive(admission: "Admission", config: str, engine: EngineDescription) -> None:
    """Raise FailedPreconditionError where a canary wants adaptive verification that can't be had."""
    if not read_keys(config).get(ADAPTIVE):
        return
    check_acceptance(engine.verifier)
    if admission.config.half_batches_from:
        raise FailedPreconditionError(
            f"half_batches_from is {admission.config.half_batches_from}, but {ADAPTIVE} goes with whole batches only; "
            "start the coordinator without it"
        )


def _pin_anew(lane: "Lane") -> None:
    """Sequences that have a drafter of which their variant takes no drafts look for another one."""
    for sequence in lane.running:
        place = sequence.draft_slot
        if place is not None and not lane.admission.variants.may_draft(sequence, place.link.drafter):
            place.link.close_slot(place)
            lane.pins.look(sequence)
    lane.pins.may_pin = lane.pins.may_pin or bool(lane.pins.looking)
