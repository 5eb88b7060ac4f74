"""One step's choices under adaptive verification, from its plan to its commit; coordinator/adaptive.py makes them."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specwire.messages import VerifyResult
from specwire.policy.adaptive import Kept
from specwire.policy.budget import Ints
from specwire.policy.cost import StepShape
from specwire.policy.curves import DraftCurve
from specwire.policy.grades import RETRY_STEPS
from specwire.policy.step_plan import DraftRequest

if TYPE_CHECKING:
    from .adaptive import LanePolicy
    from .draft_slot import DraftSlot
    from .link import DraftLink
    from .plan import Plan
    from .sequence import Sequence
    from .slots import Round, Slot

    Chunks = list[tuple[Slot, int]]

_NONE: Ints = np.zeros(0, dtype=np.int64)
"""Never written."""


@dataclass(slots=True)
class Choice:
    """One step's choices, filled in as the step goes on.

    Args:
        policy: whose they are.
        step: its number.
        request: how many drafts to ask for.
        curves: of the drafters that may be asked, in the order of shape.num_drafting.
        shape: the step without drafts.
        num_sampling: sequences that emit a token whatever is drafted.
        is_observed: calibration, forecast and grades learn from it.
        links: drafters that were asked.
        draft_ms: the work of the one that took longest; 0 = not known.
        rows: decode rows of the plan that `kept` is about: those whose drafters answered.
        num_asked, grades: of these rows, drafts that each was asked for, and its grade then; only if is_observed.
        kept: which drafts to verify; None where no drafter answered, or none was asked.
        num_offered, budget: drafts that came, and that are verified (B).
    """

    policy: "LanePolicy"
    step: int
    request: DraftRequest
    curves: tuple[DraftCurve, ...]
    shape: StepShape
    num_sampling: int
    is_observed: bool
    links: "list[DraftLink]" = field(default_factory=list)
    draft_ms: float = 0.0
    rows: Rows[int] = ()
    num_asked: Ints = field(default_factory=lambda: _NONE)
    grades: Ints = field(default_factory=lambda: _NONE)
    kept: Kept | None = None
    num_offered: int = 0
    budget: int = 0

    def num_drafts(self, place: "DraftSlot") -> int:
        """How many drafts a sequence is asked for: as many as others of its grade, now and then as many as any."""
        request = self.request
        number = request.by_grade[place.grade] if request.by_grade else request.num_drafts
        if number < request.num_drafts and self.is_observed and self.step - place.graded_step >= RETRY_STEPS:
            return request.num_drafts
        return number

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

    def observe(self, round_: "Round", result: VerifyResult, tell: Callable[[float, float], None]) -> None:
        """The round is answered and committed; `tell` hears later how long the whole step should have taken and took, in milliseconds."""
        self.policy.observe(self, round_, result, tell)
