"""The canary: a share of the requests runs with another configuration of speculation, until it is promoted or rolled back.

Drafts never change tokens, so that a request may have its configuration changed in the middle: both ends take effect at the next step.
"""

import json
import logging
import random
from collections.abc import Collection
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from specwire.canary_config import CHANGEABLE, changed
from specwire.errors import FailedPreconditionError, InvalidArgumentError, UnsupportedError
from specwire.messages import VariantStatus
from specwire.metrics import LATENCY_BOUNDS, STEP_BOUNDS, Histogram
from specwire.policy.capacity import EngineDescription
from specwire.policy.schedule import SteadySchedule, dense_schedule, schedule_ranges
from specwire.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from .drafters import Drafter
    from .lane import Lane
    from .sequence import Sequence

logger = logging.getLogger(__name__)

BASE, CANARY = "base", "canary"


class Variant:
    """One configuration while a canary runs, and what its requests came to.

    Args:
        name: base or canary.
        speculative: its configuration.
        table: K by batch size.
    """

    def __init__(self, name: str, speculative: SpeculativeConfig, table: tuple[int, ...]) -> None:
        self.name = name
        self.speculative = speculative
        self.table = table
        self.num_requests = self.num_ended = self.num_failed = 0
        self.num_generated_tokens = self.num_steps = self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.first_token = Histogram(LATENCY_BOUNDS)
        self.token = Histogram(STEP_BOUNDS)

    def ended(self, sequence: "Sequence", reason: str) -> None:
        """Counts a sequence of it."""
        self.num_ended += 1
        self.num_failed += reason == "error"
        number = sequence.num_generated_tokens
        self.num_generated_tokens += number
        self.num_steps += sequence.num_steps
        self.num_drafts += sum(sequence.accept_counts)
        self.num_draft_tokens += sequence.num_draft_tokens
        self.num_accepted_tokens += sum([accepted * count for accepted, count in enumerate(sequence.accept_counts)])
        if number:
            self.first_token.observe(sequence.first_token_ns - sequence.request.arrived_ns)
        if number > 1:
            self.token.observe((sequence.last_token_ns - sequence.first_token_ns) // (number - 1))

    def status(self, share: float) -> VariantStatus:
        """As of now.

        Args:
            share: of the requests that don't ask for a variant.
        """
        return VariantStatus(
            name=self.name,
            share=share,
            config=json.dumps({key: getattr(self.speculative, key) for key in CHANGEABLE}),
            schedule=json.dumps(schedule_ranges(self.table)),
            num_requests=self.num_requests,
            num_ended=self.num_ended,
            num_failed=self.num_failed,
            num_generated_tokens=self.num_generated_tokens,
            num_steps=self.num_steps,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            first_token_ms=_mean_ms(self.first_token),
            token_ms=_mean_ms(self.token),
        )


class Variants:
    """The configurations that requests run with.

    Args:
        speculative: the coordinator's own.
        hysteresis_steps: of the schedules.

    Attributes:
        base: of all requests that are not the canary's.
        canary: None while there is none.
        measured: base and canary of the last canary, also after its end.
    """

    def __init__(self, speculative: SpeculativeConfig, hysteresis_steps: int) -> None:
        self.speculative = speculative
        self.base: Variant | None = None
        self.canary: Variant | None = None
        self.share = 0.0
        self.measured: tuple[Variant, ...] = ()
        self._hysteresis_steps = hysteresis_steps
        self._credit = 0.0
        self._random = random.Random()
        self._own_method = ""
        self._is_own_for_all = False

    @property
    def is_adaptive(self) -> bool:
        """Adaptive verification chooses for some of them."""
        canary = self.canary
        return self.speculative.enable_adaptive_verification or (canary is not None and canary.speculative.enable_adaptive_verification)

    def may_draft(self, sequence: "Sequence", drafter: "Drafter") -> bool:
        """Whether a sequence's variant takes drafts of a drafter: a canary with a method of its own has all drafters of that, and no others have."""
        if not self._own_method:
            return True
        wants = self._is_own_for_all if self.canary is None else sequence.request.variant is self.canary
        return wants == (drafter.description is not None and drafter.description.method == self._own_method)

    def start(self, share: float, config: str, engine: EngineDescription, methods: Collection[str] | None = None) -> None:
        """Begins a canary.

        Args:
            share: of the requests, 0 to 1; 0 = those alone that ask for it.
            config: keys of the speculative configuration, as JSON.
            methods: of the drafters that are connected; None = they are not known yet.

        Raises:
            InvalidArgumentError, UnsupportedError: a share, key or value that can't be.
            FailedPreconditionError: there is a canary, nothing is drafted at all, or no drafter has the canary's method.
        """
        if self.canary is not None:
            raise FailedPreconditionError("a canary runs already; promote it or roll it back first")
        self.check_share(share)
        if not engine.num_speculative_tokens:
            raise FailedPreconditionError("nothing is drafted here, so that no canary could differ; start the coordinator with drafters")
        speculative = changed(self.speculative, config, engine.num_speculative_tokens)
        own_method = "" if speculative.method == self.speculative.method else "+".join(speculative.methods)
        if own_method and methods is not None and own_method not in methods:
            there = ", ".join(sorted(methods)) or "none"
            raise FailedPreconditionError(
                f"the canary's method is {own_method}, but no drafter that is connected has it (connected: {there}); "
                "start one and name it with --drafters"
            )
        k = min(speculative.num_speculative_tokens, engine.num_speculative_tokens)
        table = tuple(dense_schedule(speculative.num_speculative_tokens_per_batch_size, k, engine.max_num_seqs))
        self.base, self.canary = Variant(BASE, self.speculative, engine.schedule), Variant(CANARY, speculative, table)
        self.measured = self.base, self.canary
        self.share, self._credit = share, 0.0
        if own_method:
            self._own_method = own_method
        logger.info("canary: %.4g%% of the requests run with %s", 100 * share, config)

    def set_share(self, share: float) -> None:
        """Changes the share of a running canary. Raises InvalidArgumentError, or FailedPreconditionError without a canary."""
        self._need()
        self.check_share(share)
        self.share = share
        logger.info("canary: now %.4g%% of the requests", 100 * share)

    def promote(self) -> tuple[int, ...]:
        """Ends the canary: its configuration is that of all requests. Returns K by batch size."""
        canary = self._need()
        self._is_own_for_all = self._is_own_for_all or canary.speculative.method != self.speculative.method
        self.speculative = canary.speculative
        self._end()
        logger.info("canary: promoted; K by batch size %s", schedule_ranges(canary.table))
        return canary.table

    def roll_back(self) -> None:
        """Ends the canary: its requests run with the configuration of all others."""
        self._need()
        self._end()
        logger.info("canary: rolled back")

    def pick(self, wanted: str) -> Variant | None:
        """The variant of a new request; None without a canary.

        Args:
            wanted: what the request asks for; empty = by share. Shares are kept to within a request at any time, in an order that is random, so
                that no rhythm of the requests sides with one of them.
        """
        if self.canary is None:
            return None
        if wanted:
            picked = self.canary if wanted == CANARY else self.base
        else:
            self._credit += self.share
            is_canary = self._credit > self._random.random()
            self._credit -= is_canary
            picked = self.canary if is_canary else self.base
        assert picked is not None, "a canary has a base"
        picked.num_requests += 1
        return picked

    def equip(self, lane: "Lane", table: Rows[int]) -> None:
        """Gives a lane the schedules of now.

        Args:
            table: K by batch size of the base.
        """
        lane.schedule = SteadySchedule(table, self._hysteresis_steps)
        canary = self.canary
        lane.canary = None if canary is None else (canary, SteadySchedule(canary.table, self._hysteresis_steps))
        is_adaptive = False if canary is None else canary.speculative.enable_adaptive_verification
        is_alike = canary is None or is_adaptive == self.speculative.enable_adaptive_verification
        lane.is_canary_adaptive = None if is_alike else is_adaptive

    def status(self) -> tuple[VariantStatus, ...]:
        """Of the canary that runs and its base; empty without one."""
        return () if self.canary is None else self.last_status()

    def last_status(self) -> tuple[VariantStatus, ...]:
        """Of the last one, also after its end; shares are 0 then."""
        shares = (0.0, 0.0) if self.canary is None else (1 - self.share, self.share)
        return tuple(variant.status(share) for variant, share in zip(self.measured, shares, strict=False))

    def check_share(self, share: float) -> None:
        """Raise InvalidArgumentError unless it is one."""
        if not 0 <= share <= 1:
            raise InvalidArgumentError(f"the canary's share is {100 * share:g}%, but must be from 0% to 100%")

    def _need(self) -> Variant:
        if self.canary is None:
            raise FailedPreconditionError("no canary runs; start one (`specwire canary start`)")
        return self.canary

    def _end(self) -> None:
        self.base = self.canary = None
        self.share = 0.0


def check_variant(name: str) -> None:
    """Raise UnsupportedError unless a request may ask for it. It may ask for the canary also when none runs: whoever does goes on at its end."""
    if name not in ("", BASE, CANARY):
        raise UnsupportedError(f"variant {name!r} is not served; only {BASE} and {CANARY} are: leave variant empty")


def _mean_ms(histogram: Histogram) -> float:
    """Of nanoseconds; 0 before the first one."""
    return 1000 * histogram.sum / histogram.count if histogram.count else 0.0
