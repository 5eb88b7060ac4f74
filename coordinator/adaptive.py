"""Adaptive verification in a lane's step: what the policy is told of a step, and what its choices come to. How it chooses is said in
specwire.policy.adaptive."""

import logging
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specwire.config import CoordinatorConfig
from specwire.messages import RowStatus, VerifyCost, VerifyResult
from specwire.policy.adaptive import AdaptivePolicy, Kept
from specwire.policy.cost import StepCost, StepMs, StepShape
from specwire.policy.curves import VerifyCurve
from specwire.policy.request import DraftRequest

from .calibration import Calibration
from .drafters import NO_DRAFTS
from .metrics import step_parts

if TYPE_CHECKING:
    from .lane import Lane
    from .link import DraftLink
    from .plan import Plan
    from .sequence import Sequence
    from .slots import Round, Slot

    Chunks = list[tuple[Slot, int]]

logger = logging.getLogger(__name__)

_NO_SCORE = 0.5
"""Of a draft whose drafter gives none: calibration learns what it is worth."""
_REPEATS = (4, 16, 64)
"""Steps until a probe is repeated that found all drafters catching up: they go on with that meanwhile."""
_OK = RowStatus.OK


@dataclass(slots=True)
class Choice:
    """One step's choices, filled in as the step goes on.

    Args:
        policy: whose they are.
        step: its number.
        request: how many drafts to ask for.
        shape: the step without drafts.
        num_sampling: sequences that emit a token whatever is drafted.
        links: drafters that were asked.
        draft_ms: the work of the one that took longest; 0 = not known.
        rows: decode rows of the round that `kept` is about: those whose drafters answered.
        kept: which drafts to verify; None where no drafter answered, or none was asked.
        num_offered, budget: drafts that came, and that are verified (B).
        step_ms: predicted and measured time of the whole step; None where either is not known.
    """

    policy: "LanePolicy"
    step: int
    request: DraftRequest
    shape: StepShape
    num_sampling: int
    links: "list[DraftLink]" = field(default_factory=list)
    draft_ms: float = 0.0
    rows: list[int] = field(default_factory=list)
    kept: Kept | None = None
    num_offered: int = 0
    budget: int = 0
    step_ms: tuple[float, float] | None = None

    def asking(self, links: "list[DraftLink]") -> None:
        """The drafters that have asks are about to get them."""
        self.links = [link for link in links if link.asks]
        for link in self.links:
            link.draft_ms = 0.0

    def drafted(self) -> None:
        """What came in time has come."""
        times = [link.draft_ms for link in self.links]
        self.draft_ms = max(times) if times and all(times) else 0.0

    def settle(self, decodes: "list[Sequence]", chunks: "Chunks", *, is_drafting: bool) -> None:
        """The step is planned: it has these rows, and some sequence may get drafts, or none may."""
        self.policy.settle(self, decodes, chunks, is_drafting=is_drafting)

    def keep(self, plan: "Plan", drafts: list[list[int]]) -> list[list[int]]:
        """The drafts worth verifying: a prefix of each row's. No row may go between this and the sending of the round."""
        return self.policy.keep(self, plan, drafts)

    def observe(self, round_: "Round", result: VerifyResult) -> None:
        """The round is answered and committed."""
        self.policy.observe(self, round_, result)


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
        self._calibration = calibration
        self._label = label
        self._reads_kv = cost.ms_per_kv_token > 0
        self._num_repeats = 0
        self._repeat_at = -1
        self._finished_ns = 0

    def choose(self, lane: "Lane", decodes: "list[Sequence]", chunks: "Chunks", most: int) -> Choice | None:
        """How many drafts the next step asks for, up to `most`; None where there is nobody to ask. Asked again for a step, it says the same.

        Args:
            chunks: what it may compute beside its decode rows.
        """
        num_drafting: dict[DraftLink, int] = {}
        for sequence in decodes:
            place = sequence.draft_slot
            if place is not None and sequence.max_drafts and place.link.is_usable:
                num_drafting[place.link] = num_drafting.get(place.link, 0) + 1
        if not num_drafting or not most:
            return None
        step = lane.next_round
        self.cost.drafts = tuple([link.drafter.curve for link in num_drafting])
        most = min(most, max(link.drafter.max_drafts for link in num_drafting))
        shape, num_sampling = self._shape(decodes, chunks, tuple(num_drafting.values()), leaves_run_ahead=not lane.is_lockstep)
        request = self.policy.choose_request(step, shape, num_sampling, most)
        if request.num_drafts < most and step == self._repeat_at:
            request = DraftRequest(most, is_probe=True)
        self._note_fallback(request.fallback)
        return Choice(self, step, request, shape, num_sampling)

    def settle(self, choice: Choice, decodes: "list[Sequence]", chunks: "Chunks", *, is_drafting: bool) -> None:
        """See `Choice.settle`."""
        old = choice.shape
        choice.shape, choice.num_sampling = self._shape(decodes, chunks, old.num_drafting, leaves_run_ahead=old.leaves_run_ahead)
        choice.shape = choice.shape._replace(num_requested=choice.request.num_drafts if is_drafting else 0)

    def keep(self, choice: Choice, plan: "Plan", drafts: list[list[int]]) -> list[list[int]]:
        """See `Choice.keep`."""
        scores: list[list[float]] = []
        num_asked: list[int] = []
        groups: list[int] = []
        places: list[int] = []  # among the plan's rows
        kinds: dict[DraftLink, tuple[int, int]] = {}
        row, num_rows_asked = -1, 0
        for index, (sequence, draft, most) in enumerate(zip(plan.decodes, drafts, plan.num_drafts, strict=True)):
            slot, place = sequence.slot, sequence.draft_slot
            if slot is None or slot.is_closed:
                continue
            row += 1
            num_rows_asked += most > 0
            if draft is NO_DRAFTS or place is None:
                continue  # it was not asked, or not answered, which says nothing of its drafts
            confidences = place.confidences
            if len(confidences) != len(draft):
                confidences = [_NO_SCORE] * len(draft)
            scores.append(confidences[:most] if len(draft) > most else confidences)
            num_asked.append(min(most, place.num_asked))
            groups.append((kinds.get(place.link) or self._kind(kinds, place.link))[sequence.is_greedy])
            places.append(index)
            choice.rows.append(row)
        self._note_answers(choice.request, choice.step, num_rows_asked, len(places))
        if not places:
            return drafts
        kept = choice.kept = self.policy.choose_kept(choice.request, scores, num_asked, groups, choice.shape, choice.num_sampling)
        numbers = kept.num_kept.tolist()
        choice.num_offered, choice.budget = sum(map(len, scores)), sum(numbers)
        for index, number in zip(places, numbers, strict=True):
            if len(drafts[index]) != number:
                drafts[index] = drafts[index][:number]
        return drafts

    def observe(self, choice: Choice, round_: "Round", result: VerifyResult) -> None:
        """Learns from what became of the step's drafts, and how long it took."""
        if choice.kept is not None:
            answers = result.rows
            num_accepted = np.array([
                answers[row].num_accepted if answers[row].status is _OK and answers[row].num_accepted <= most else -1
                for row, most in zip(choice.rows, choice.kept.num_kept.tolist(), strict=True)
            ])  # fmt: skip
            self.policy.observe(choice.kept, num_accepted)
        if self.cost.unknown or not result.timing.received_ns:
            return
        shape = choice.shape
        if len(round_.rows) != shape.num_rows:
            shape = shape._replace(num_tokens=sum([row.token_budget or 1 for row in round_.rows]), num_rows=len(round_.rows))
        choice.step_ms = self.cost.observe(choice.budget, shape, self._measure(choice, round_, result))

    def _measure(self, choice: Choice, round_: "Round", result: VerifyResult) -> StepMs:
        timing, parts = result.timing, step_parts(round_.plan.times, result.timing, time.monotonic_ns())
        # A clock that is set meanwhile counts only as far as it fits into the round trip.
        verify_ns = min(max(0, timing.finished_ns - max(timing.started_ns, self._finished_ns)), parts.forward)
        self._finished_ns = timing.finished_ns
        hop_ms = (parts.plan + parts.verify_hop + parts.commit) / 1e6
        if not choice.shape.num_requested:
            return StepMs(verify_ns / 1e6, 0.0, hop_ms)
        draft_ms = min(choice.draft_ms, parts.propose / 1e6)
        return StepMs(verify_ns / 1e6, draft_ms, hop_ms + parts.propose / 1e6 - draft_ms if draft_ms else 0.0)

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

    def _kind(self, kinds: "dict[DraftLink, tuple[int, int]]", link: "DraftLink") -> tuple[int, int]:
        assert link.drafter.description is not None, "a drafter that has answered has described itself"
        kinds[link] = self._calibration.kind(link.drafter.description)
        return kinds[link]

    def _note_answers(self, request: DraftRequest, step: int, num_asked: int, num_answered: int) -> None:
        """A probe that nobody answered has shown nothing: after many steps without drafts, drafters must catch up first."""
        if num_answered or not num_asked:
            self._num_repeats = 0
        elif request.is_probe and self._num_repeats < len(_REPEATS):
            self._repeat_at = step + _REPEATS[self._num_repeats]
            self._num_repeats += 1
        else:
            self._num_repeats = 0

    def _note_fallback(self, fallback: str) -> None:
        if fallback != self.fallback:
            self.fallback = fallback
            if fallback:
                logger.warning("%s: adaptive verification has nothing to go by, and K is fixed, since %s", self._label, fallback)
            else:
                logger.info("%s: adaptive verification chooses K", self._label)
