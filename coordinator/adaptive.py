"""Adaptive verification in a lane's step: what the policy is told of a step, and what its choices come to. How it chooses is said in
specwire.policy.adaptive."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specwire.config import CoordinatorConfig
from specwire.messages import VerifyCost, VerifyResult
from specwire.policy.adaptive import AdaptivePolicy
from specwire.policy.budget import Ints
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.curves import VerifyCurve
from specwire.policy.grades import NUM_GRADES
from specwire.policy.probes import PLAIN_STEPS, num_probed_rows
from specwire.policy.step_plan import ProbeRoom

from .calibration import Calibration
from .choice import Choice
from .draft_slot import OPEN_ALL, OPEN_NONE, Opening, least_judged
from .keeping import Keeper
from .learning import Learner

if TYPE_CHECKING:
    from .draft_slot import DraftSlot
    from .lane import Lane
    from .link import DraftLink
    from .plan import Plan
    from .sequence import Sequence
    from .slots import Round, Slot

    Chunks = list[tuple[Slot, int]]

logger = logging.getLogger(__name__)

_FEW_LEFT = 16
"""Tokens that no sequence may still get, with which drafting does not begin any more, nor is interrupted."""
_NUM_LOOKED_AT = 8
"""Sequences that show this."""
_MOST_OPENED, _PROBES_PER_OPENING = 4, 4
"""Times as many sequences as a probe asks that drafters are told of for probes, and probes after which they are told of as many more."""
_OBSERVED_PER_STEP = 16
"""Rows that calibration, forecast and grades learn from, on average: with more of them they learn from one step of a few, since learning must not
take more than its share of the step's time, most of which goes into the start of each computation."""
_PLAIN_STRIDE = 4
"""Of so many steps without drafts, whose time is all that they show, one is learned from."""


class LanePolicy:
    """The policy of one lane while it is connected.

    Args:
        config: hysteresis, and share of probes.
        calibration: of all lanes.
        cost: the verifier's table.
        max_drafts: K_max.
        num_in_flight: rounds in flight (W).
        label: what the log calls the lane.

    Attributes:
        fallback: why K is fixed now; empty if it is not.
    """

    def __init__(
        self, config: CoordinatorConfig, calibration: Calibration, cost: VerifyCost, max_drafts: int, num_in_flight: int, label: str
    ) -> None:
        self.cost = StepCost(VerifyCurve(cost), (), num_in_flight=num_in_flight)
        self.policy = AdaptivePolicy(
            self.cost, calibration.calibrator, max_drafts, hysteresis=config.adaptive_hysteresis, probe_share=config.adaptive_probe_share
        )
        self.fallback = ""
        self._learner = Learner(self.cost, self.policy)
        self._keeper = Keeper(self.cost, self.policy, calibration)
        self._label = label
        self._reads_kv = cost.ms_per_kv_token > 0

    def choose(self, lane: "Lane", decodes: "list[Sequence]", chunks: "Chunks", most: int) -> Choice | None:
        """How many drafts the next step asks for, up to `most`; None where there is nobody to ask. Asked again for a step, it says the same.

        Args:
            chunks: what it may compute beside its decode rows.
        """
        links = self._use_links(lane)
        if not decodes or not links or not most:
            return None
        num_drafting = _shares(links, len(decodes))
        step = lane.next_round
        most = 0 if not self.cost.unknown and _is_no_time_to_draft(lane, decodes, chunks) else _most_drafts(links, most)
        shape, num_sampling = self._shape(decodes, chunks, num_drafting, leaves_run_ahead=not lane.is_lockstep)
        room = ProbeRoom(
            partial(_wait_ms, links, num_drafting),
            lambda: any(sequence.draft_slot.is_in_step for sequence in decodes if sequence.draft_slot),
            lambda: _is_ending(decodes, PLAIN_STEPS),
        )
        request = self.policy.choose_request(step, shape, num_sampling, most, lambda: _count_grades(decodes), room)
        self._note_fallback(request.fallback)
        stride = max(1 if request.num_drafts else _PLAIN_STRIDE, shape.num_rows // _OBSERVED_PER_STEP)
        is_observed = request.is_probe or request.is_measured or not step % stride
        return Choice(self, step, request, self.cost.drafts, shape, num_sampling, is_observed)

    def opening(self, lane: "Lane", decodes: "list[Sequence]", choice: Choice | None, most: int) -> Opening:
        """Sequences that each drafter is told of, where at most so many drafts are asked for: to compute a prompt for drafts that are never asked
        for takes a drafter's time, and the verifier's, too, where they share a device. All if they get drafts, or would get some once all that run
        decode; as many as a probe asks if one is about to come, and some more after some probes, so that not always the same ones are asked."""
        links = self._use_links(lane)
        if not links or self.fallback or (choice is not None and choice.request.num_drafts and not choice.request.is_lone):
            return OPEN_ALL
        running = list(lane.running)
        if _is_ending(running):
            return OPEN_NONE
        if any(link.has_unopened for link in links):
            shape, _ = self._shape(running, [], _shares(links, len(running)), leaves_run_ahead=True)
            if self.policy.would_draft(shape, _most_drafts(links, most)):
                return OPEN_ALL
        if not self.policy.is_probe_near:
            return OPEN_NONE
        times = min(_MOST_OPENED, 1 + self.policy.counters.num_probes // _PROBES_PER_OPENING)
        return Opening(times * num_probed_rows(len(running)), self._next_probed(decodes, choice))

    def opening_beside(self, decodes: "list[Sequence]", choice: Choice | None) -> Opening:
        """The same for a lane whose other rows it does not choose for: drafters are told of all sequences."""
        return Opening(OPEN_ALL.most_open, self._next_probed(decodes, choice))

    def settle(self, choice: Choice, decodes: "list[Sequence]", chunks: "Chunks", *, is_drafting: bool) -> None:
        """See `Choice.settle`."""
        old, request = choice.shape, choice.request
        choice.shape, choice.num_sampling = self._shape(decodes, chunks, old.num_drafting, leaves_run_ahead=old.leaves_run_ahead)
        if is_drafting:
            choice.shape = choice.shape._replace(num_requested=request.num_drafts, num_asked=request.num_asked)

    def keep(self, choice: Choice, plan: "Plan", drafts: list[list[int]]) -> list[list[int]]:
        """See `Choice.keep`."""
        drafts = self._keeper.cut(choice, plan, drafts)
        return self._keeper.keep(choice, plan, drafts) if choice.rows else drafts

    def idle(self) -> None:
        """The lane has nothing to do."""
        self.cost.clock.pause()

    def observe(self, choice: Choice, round_: "Round", result: VerifyResult, tell: Callable[[float, float], None]) -> None:
        """See `Choice.observe`."""
        self._learner.observe(choice, round_, result, tell)

    def _use_links(self, lane: "Lane") -> "list[DraftLink]":
        """Those that may be asked, by whose drafters the step is priced."""
        links = [link for link in lane.links if link.is_usable and link.slots]
        self.cost.drafts = tuple([link.drafter.curve for link in links])
        return links

    def _next_probed(self, decodes: "list[Sequence]", choice: Choice | None) -> "list[DraftSlot]":
        """Places that a probe is about to ask, so that their drafters must know all of them."""
        if not self.policy.is_probe_near or (choice is not None and choice.request.num_drafts):
            return []
        places = [place for sequence in decodes if (place := sequence.draft_slot) is not None and place.is_open]
        return least_judged(places, num_probed_rows(len(decodes)))

    def _shape(self, decodes: "list[Sequence]", chunks: "Chunks", num_drafting: Rows[int], *, leaves_run_ahead: bool) -> tuple[StepShape, int]:
        """The shape of a step that asks for no drafts, and how many sequences sample in it."""
        num_sampling, num_chunk_tokens, longest = len(decodes), 0, 1
        reads_kv = self._reads_kv or any(curve.reads_kv for curve in self.cost.drafts)
        num_kv_tokens = sum([len(sequence.token_ids) for sequence in decodes]) if reads_kv else 0
        for slot, budget in chunks:
            num_chunk_tokens += budget
            longest = max(longest, budget)
            num_sampling += budget >= slot.num_remaining_tokens
            num_kv_tokens += slot.num_computed_tokens
        shape = StepShape(
            num_tokens=len(decodes) + num_chunk_tokens,
            num_rows=len(decodes) + len(chunks),
            num_kv_tokens=num_kv_tokens,
            longest_row=longest,
            num_drafting=num_drafting,
            leaves_run_ahead=leaves_run_ahead,
        )
        return shape, num_sampling

    def _note_fallback(self, fallback: str) -> None:
        if fallback != self.fallback:
            self.fallback = fallback
            if fallback:
                logger.warning("%s: adaptive verification has nothing to go by, and K is fixed, since %s", self._label, fallback)
            else:
                logger.info("%s: adaptive verification chooses K", self._label)


def _shares(links: "list[DraftLink]", total: int) -> tuple[int, ...]:
    """About how many of `total` decoding sequences are whose; those that still prefill have places there, too."""
    numbers = [len(link.slots) for link in links]
    num_open = sum(numbers)
    return tuple(numbers) if num_open <= total else tuple([-(-number * total // num_open) for number in numbers])


def _most_drafts(links: "list[DraftLink]", most: int) -> int:
    """Up to `most`, as far as any of them drafts."""
    return min(most, max([link.drafter.max_drafts for link in links]))


def _is_no_time_to_draft(lane: "Lane", decodes: "list[Sequence]", chunks: "Chunks") -> bool:
    """Whether the batch still grows: what would pay for those that decode already would keep the others waiting. Or is about to end: leaving
    run-ahead pays only over some steps."""
    if chunks and 2 * sum([sequence.slot.is_prefilling for sequence in lane.running if sequence.slot is not None]) > len(lane.running):
        return True
    return not lane.is_lockstep and _is_ending(decodes)


def _is_ending(sequences: "list[Sequence]", num_steps: int = 0) -> bool:
    """Whether they will have few tokens left after so many steps without drafts, as far as some of them show."""
    stride = -(-len(sequences) // _NUM_LOOKED_AT)
    return max([one.max_len - len(one.token_ids) for one in (*sequences[::stride], sequences[-1])]) < _FEW_LEFT + num_steps


def _wait_ms(links: "list[DraftLink]", num_drafting: Rows[int], num_drafts: int, num_sequences: int) -> float:
    """How long a step may wait for so many drafts of each of so many sequences, whose drafter any may be."""
    return 1000 * max([link.drafter.wait_s(num_drafts, min(number, num_sequences)) for link, number in zip(links, num_drafting, strict=True)])


def _count_grades(decodes: "list[Sequence]") -> Ints:
    """[grades] sequences of each that have a place at a drafter."""
    grades = [place.grade for sequence in decodes if (place := sequence.draft_slot) is not None]
    return np.bincount(np.array(grades, dtype=np.int64), minlength=NUM_GRADES)
