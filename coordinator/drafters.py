"""The drafters: what each can hold and how fast it answers, and proposing, which asks all of a lane's drafters at once."""

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from specwire.messages import ServiceDescription
from specwire.policy.capacity import EngineDescription
from specwire.policy.curves import DraftCurve

from .countdown import Countdown
from .limits import check_drafter
from .reply_times import ReplyTimes

if TYPE_CHECKING:
    from .lane import Lane
    from .link import DraftLink
    from .plan import Plan

_WAIT_FACTOR = 3.0
_MOST_WAIT_S = 30.0
"""Whatever a drafter says of itself, no step waits longer."""
NO_DRAFTS: list[int] = []
"""Shared by all rows without drafts; never written."""


class Drafter:
    """One drafter, shared by all lanes.

    Attributes:
        num_open: slots that this coordinator's lanes hold there.
        links: those that are connected, or about to be.
        window: longest sequence that it drafts for.
        needs_features: it is to hear where the target's features of its sequences are.
        curve: what its drafts cost, followed by all lanes.
        description: as of its last connection; None before the first.
    """

    def __init__(self, address: str, config: CoordinatorConfig, server_name: str = "") -> None:
        self.address = address
        self.server_name = server_name
        self.links: set[DraftLink] = set()
        self.num_open = 0
        self.max_num_seqs = 0
        self.max_drafts = 0
        self.window = 0
        self.needs_features = False
        self.times = ReplyTimes()
        self.curve = DraftCurve(())
        self._chunk_s = 0.0
        self._min_wait_s = config.min_draft_wait_ms / 1000
        self._window = config.speculative_config.max_model_len or sys.maxsize
        self.description: ServiceDescription | None = None
        self._instance_id = ""

    @property
    def is_connected(self) -> bool:
        return any(link.is_connected for link in self.links)

    @property
    def is_late(self) -> bool:
        """Some lane waits for it."""
        return any(link.is_late for link in self.links)

    def accept(self, engine: EngineDescription, description: ServiceDescription, others: "Iterable[Drafter]") -> None:
        """Takes over its capacities.

        Raises:
            FailedPreconditionError: its tokens are not the target's, its messages are too small, or another of its addresses is in use.
        """
        check_drafter(engine, description)
        for other in others:
            if other is not self and other.links and other._instance_id == description.instance_id != "":
                raise FailedPreconditionError(f"it is the same process as drafter {other.address}, which is connected already; name it once")
        self.description = description
        self.max_num_seqs = description.max_num_seqs or sys.maxsize
        self.max_drafts = description.max_num_draft_tokens or sys.maxsize
        self._chunk_s = description.draft_chunk_ms / 1000
        self.needs_features = bool(description.feature_sets)
        self.window = min(self._window, description.max_model_len or sys.maxsize)
        if description.instance_id != self._instance_id:
            self._instance_id = description.instance_id
            self.times = ReplyTimes(description.draft_cost)
            self.curve = DraftCurve(description.draft_cost, description.draft_ms_per_kv_token)

    def wait_s(self, num_draft_tokens: int, num_sequences: int) -> float:
        """How long a step may wait for an answer: one that comes behind a chunk of the drafter's background work is no late one."""
        wait_s = max(self._min_wait_s, _WAIT_FACTOR * self.times.predict(num_draft_tokens, num_sequences)) + self._chunk_s
        return min(wait_s, max(self._min_wait_s, _MOST_WAIT_S))


async def propose(lane: "Lane", plan: "Plan") -> list[list[int]]:
    """Drafts for each decoding sequence of the plan, empty where there are none in time. Changes no sequence.

    Opens go along while drafts may be asked for, so that prefills at the drafter begin early; closes always do.
    """
    if plan.num_speculative_tokens and not all(plan.num_drafts):
        _count_undrafted(lane, plan)
    if plan.is_drafting:
        plan.times.asked_ns = time.monotonic_ns()
        for sequence, num_drafts in zip(plan.decodes, plan.num_drafts, strict=True):
            if num_drafts:
                place = sequence.draft_slot
                assert place is not None, "the plan has drafts for a sequence without a drafter"
                if place.base_len != len(sequence.token_ids) or not place.drafts:
                    place.num_asked = num_drafts
                    place.link.asks.append(place)
    if plan.choice is not None:
        plan.choice.asking(lane.links)
    countdown = Countdown()
    for link in lane.links:
        link.post(countdown, plan.opening)
    await countdown.wait()
    if not plan.is_drafting:
        return [NO_DRAFTS] * len(plan.decodes)
    plan.times.drafted_ns = time.monotonic_ns()
    if plan.choice is not None:
        plan.choice.drafted()
    drafts = []
    for sequence, num_drafts in zip(plan.decodes, plan.num_drafts, strict=True):
        place = sequence.draft_slot if num_drafts else None
        drafts.append(place.drafts if place is not None and place.base_len == len(sequence.token_ids) else NO_DRAFTS)
    return drafts


def _count_undrafted(lane: "Lane", plan: "Plan") -> None:
    """Counts and logs sequences that decode plainly because every drafter is absent, late or full, or has refused them."""
    num_undrafted = 0
    for sequence, num_drafts in zip(plan.decodes, plan.num_drafts, strict=True):
        if num_drafts or not sequence.max_drafts or (sequence.draft_slot is not None and sequence.draft_slot.link.is_usable):
            continue
        length = len(sequence.token_ids)
        num_undrafted += not lane.links or any(not link.is_connected or length < link.drafter.window for link in lane.links)
    if num_undrafted:
        lane.counters.fallbacks["no_drafter"] += num_undrafted
        lane.log.warning(
            f"no drafter {lane.index}", "lane %d: %d of %d sequences go without drafts: every drafter is absent, late or full, or has refused them",
            lane.index, num_undrafted, len(plan.decodes),
        )  # fmt: skip
