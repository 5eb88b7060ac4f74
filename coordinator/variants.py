"""The canary: a share of the requests runs with another configuration of speculation, until it is promoted or rolled back.

Drafts never change tokens, so that a request may have its configuration changed in the middle: both ends take effect at the next step.
"""

import dataclasses
import json
import logging
import random
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any

from specwire.errors import FailedPreconditionError, InvalidArgumentError, UnsupportedError
from specwire.messages import CanaryAction, VariantStatus
from specwire.metrics import LATENCY_BOUNDS, STEP_BOUNDS, Histogram
from specwire.policy.capacity import EngineDescription
from specwire.policy.schedule import SteadySchedule, dense_schedule, describe_clipping, schedule_ranges
from specwire.speculative_config import SpeculativeConfig, read_keys

if TYPE_CHECKING:
    from .admission import Admission
    from .lane import Lane
    from .sequence import Sequence

logger = logging.getLogger(__name__)

BASE, CANARY = "base", "canary"
_K, _SCHEDULE = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
CHANGEABLE = (_K, _SCHEDULE)
"""Keys in which a canary may differ. K and its schedule say how many drafts a request is given; all else is a matter of the services themselves."""
_WHY_NOT = {
    "enable_adaptive_verification": "it chooses for all sequences of a step together; what a canary says is a ceiling of what it chooses",
}
_OTHER_SERVICES = "drafters and verifiers are started with it; start another coordinator with other ones"


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

    def start(self, share: float, config: str, engine: EngineDescription) -> None:
        """Begins a canary.

        Args:
            share: of the requests, 0 to 1; 0 = those alone that ask for it.
            config: keys of the speculative configuration, as JSON.

        Raises:
            InvalidArgumentError, UnsupportedError: a share, key or value that can't be.
            FailedPreconditionError: there is a canary, or nothing is drafted at all.
        """
        if self.canary is not None:
            raise FailedPreconditionError("a canary runs already; promote it or roll it back first")
        self.check_share(share)
        if not engine.num_speculative_tokens:
            raise FailedPreconditionError("nothing is drafted here, so that no canary could differ; start the coordinator with drafters")
        speculative = changed(self.speculative, config, engine.num_speculative_tokens)
        k = min(speculative.num_speculative_tokens, engine.num_speculative_tokens)
        table = tuple(dense_schedule(speculative.num_speculative_tokens_per_batch_size, k, engine.max_num_seqs))
        self.base, self.canary = Variant(BASE, self.speculative, engine.schedule), Variant(CANARY, speculative, table)
        self.measured = self.base, self.canary
        self.share, self._credit = share, 0.0
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


def set_canary(admission: "Admission", action: CanaryAction, share: float, config: str) -> tuple[VariantStatus, ...]:
    """Does what is asked for with the canary, on all lanes from their next steps on. Returns what base and canary came to so far.

    Raises:
        InvalidArgumentError, UnsupportedError, FailedPreconditionError: it can't be done.
    """
    variants, engine = admission.variants, admission.description
    if engine is None:
        raise FailedPreconditionError("no verifier was reached yet, so that it is not known what a canary may be; wait until health is SERVING")
    if action is CanaryAction.START:
        variants.start(share, config, engine)
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
        lane.wake()
    return variants.last_status()


def changed(speculative: SpeculativeConfig, config: str, most: int) -> SpeculativeConfig:
    """A configuration with other values of some keys. A K without a schedule replaces the schedule, too.

    Args:
        config: those keys, as JSON.
        most: K for which the services were started.

    Raises:
        InvalidArgumentError: an unknown key or a wrong value, or nothing is changed.
        UnsupportedError: a key in which requests of one coordinator can't differ.
    """
    given = read_keys(config)
    for key, value in given.items():
        if key not in CHANGEABLE and value != getattr(speculative, key, None):
            why = _WHY_NOT.get(key, _OTHER_SERVICES)
            raise UnsupportedError(f"the canary's {key} is {value!r}, but it may differ only in {' and '.join(CHANGEABLE)}: {why}")
    values: dict[str, Any] = {key: given[key] for key in CHANGEABLE if key in given}
    if _K in values:
        values = {_SCHEDULE: None} | values
        if isinstance(values[_K], int) and values[_K] > most:
            text = f"the canary's {_K} is {values[_K]}, but the services were started for {most}"
            raise InvalidArgumentError(f"{text}; choose that or less, or restart them with more and a schedule that gives the base less")
    if isinstance(values.get(_SCHEDULE), list):
        values[_SCHEDULE] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in values[_SCHEDULE])
    checked = SpeculativeConfig(**values)
    k = checked.num_speculative_tokens if _K in values else speculative.num_speculative_tokens
    if speculative.synthetic_acceptance_rates is not None:
        values["synthetic_acceptance_rates"] = speculative.synthetic_acceptance_rates[:k]
    if speculative.synthetic_acceptance_length is not None:
        values["synthetic_acceptance_length"] = min(speculative.synthetic_acceptance_length, k + 1)
    result = dataclasses.replace(speculative, **values)
    if result == speculative:
        raise InvalidArgumentError(f"the canary's configuration is that of all requests; change {' or '.join(CHANGEABLE)}")
    return result


def _mean_ms(histogram: Histogram) -> float:
    """Of nanoseconds; 0 before the first one."""
    return 1000 * histogram.sum / histogram.count if histogram.count else 0.0
