"""The model that is served: the first verifier's, until another one may take its place."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError, UnavailableError
from specwire.messages import ServiceDescription
from specwire.policy.capacity import EngineDescription, describe_engine
from specwire.policy.effective import EffectiveSetting, effective_speculation
from specwire.policy.schedule import dense_schedule
from specwire.tokenizer import Tokenizer

from .admission import Admission
from .calibration import check_acceptance, need_calibration
from .canary import check_adaptive
from .fleet import Fleet
from .lane import Lane
from .limits import check_lane
from .peers import VerifierPeer, answer_in_time

logger = logging.getLogger(__name__)


class Target:
    """What all lanes serve, and what follows from it: capacities, tokenizer, speculation.

    A verifier that serves something else is refused as long as anybody may need what is served: a lane that has it or may find it again, or a
    request that was admitted for it. With nobody left it is what is served from now on, as if the coordinator had been started anew.

    Args:
        config: limits and speculation.
        admission: gets the capacities.
        fleet: its drafters must match.
        num_requests: how many were admitted and have not ended.

    Attributes:
        tokenizer: None where none is served, or known yet.
        speculation: the configuration in effect; empty until a verifier was reached.
        on_change: called when another model has taken the place of the first.
    """

    def __init__(self, config: CoordinatorConfig, admission: Admission, fleet: Fleet, num_requests: Callable[[], int]) -> None:
        self._config = config
        self._admission = admission
        self._fleet = fleet
        self._num_requests = num_requests
        self.tokenizer: Tokenizer | None = None
        self.speculation: tuple[EffectiveSetting, ...] = ()
        self.on_change: list[Callable[[], None]] = []
        self._stopping: set[asyncio.Task[None]] = set()

    async def accept(self, lane: Lane, peer: VerifierPeer, description: ServiceDescription) -> None:
        """Makes sure that a verifier that was reached can be a lane.

        Raises:
            FailedPreconditionError: it can't, or not yet.
            UnavailableError: what is served has changed meanwhile; the next attempt may fare better.
        """
        engine = self._admission.description
        if engine is None:
            engine = self.adopt(describe_engine(self._config, [description]))
        if self._admission.calibration is not None:
            check_acceptance(description)
        try:
            check_lane(engine, description)
        except FailedPreconditionError as error:
            await self._succeed(lane, peer, description, str(error))
        else:
            if self.tokenizer is None and description.tokenizer_fingerprint:
                self.tokenizer = await _fetch_tokenizer(peer, description)

    def adopt(self, engine: EngineDescription) -> EngineDescription:
        """The first verifiers are there. Returns what is served."""
        if self._config.canary_config:
            check_adaptive(self._admission, self._config.canary_config, engine)
            self._admission.variants.start(self._config.canary_share, self._config.canary_config, engine)
        self._use(engine)
        self._fleet.connect_drafters()
        return engine

    def describe_speculation(self) -> None:
        """Brings `speculation` up to date."""
        engine = self._admission.description
        assert engine is not None, "speculation is described once a verifier is known"
        # Without the canary of the start: once that is promoted, it is no other configuration any more.
        in_effect = dataclasses.replace(self._config, speculative_config=self._admission.variants.speculative, canary_config="")
        self.speculation = tuple(effective_speculation(in_effect, engine))

    async def stop(self) -> None:
        """Writes what calibration has learned."""
        if self._admission.calibration is not None:
            await self._admission.calibration.stop()
        await asyncio.gather(*self._stopping)

    # --- another model ---

    async def _succeed(self, lane: Lane, peer: VerifierPeer, description: ServiceDescription, difference: str) -> None:
        """Serves from now on what this verifier does."""
        before = self._admission.description
        self._check_unneeded(lane, difference)
        engine = self._describe(description)
        tokenizer = await _fetch_tokenizer(peer, description) if description.tokenizer_fingerprint else None
        self._check_unneeded(lane, difference)
        if self._admission.description is not before:
            raise UnavailableError("another verifier has changed what is served meanwhile")
        logger.warning("lane %d: another model is served from now on: verifier %s: %s", lane.index, lane.address, difference)
        variants, calibration = self._admission.variants, self._admission.calibration
        if variants.canary is not None:
            logger.warning("the canary ends: what it was measured with is not served any more")
            variants.roll_back()
        if calibration is not None:
            # Scores are worth something else with another target.
            self._admission.calibration = None
            stopping = asyncio.create_task(calibration.stop())
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
        self.tokenizer = tokenizer
        self._use(engine)
        self._fleet.check_drafters()
        for tell in self.on_change:
            tell()

    def _check_unneeded(self, lane: Lane, difference: str) -> None:
        """Raise FailedPreconditionError if what is served may be needed any more."""
        engine = self._admission.description
        assert engine is not None, "only what is served can be needed"
        for other in self._admission.lanes:
            if other is not lane and other.described is not None and _matches(engine, other.described):
                where = f"lane {other.index}'s verifier {other.address} has the one before" + ("" if other.is_connected else ", and may come back")
                raise FailedPreconditionError(f"{difference}; where it is meant to be another model now, restart the coordinator: {where}")
        if number := self._num_requests():
            raise FailedPreconditionError(
                f"{difference}; it is taken as another model once no request is left that was admitted for the one before ({number} are, and wait "
                f"for a verifier that has it, at most for {self._config.verifier_wait_s:g} s)"
            )

    def _describe(self, description: ServiceDescription) -> EngineDescription:
        """With the schedule of a canary that was promoted, if one was."""
        engine, speculative = describe_engine(self._config, [description]), self._admission.variants.speculative
        if speculative is self._config.speculative_config:
            return engine
        k = min(speculative.num_speculative_tokens, engine.num_speculative_tokens)
        table = dense_schedule(speculative.num_speculative_tokens_per_batch_size, k, engine.max_num_seqs)
        return dataclasses.replace(engine, schedule=tuple(table))

    def _use(self, engine: EngineDescription) -> None:
        self._admission.description = engine
        logger.info(
            "the model is %s: at most %d tokens a sequence, %d sequences and %d tokens a round, K by batch size %s",
            engine.model_id, engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens, engine.schedule_ranges,
        )  # fmt: skip
        for reason in engine.reasons:
            logger.info("clipped: %s", reason)
        self.describe_speculation()
        logger.info("speculation: %s", ", ".join(f"{setting.key} {setting.value}" for setting in self.speculation))
        if self._admission.variants.is_adaptive and engine.num_speculative_tokens:
            need_calibration(self._admission, engine)


async def _fetch_tokenizer(peer: VerifierPeer, description: ServiceDescription) -> Tokenizer:
    spec = await answer_in_time(peer.get_tokenizer(), "GetTokenizer")
    if spec.fingerprint != description.tokenizer_fingerprint:
        text = f"its tokenizer has fingerprint {spec.fingerprint or 'none'}, but its description {description.tokenizer_fingerprint}"
        raise UnavailableError(f"{text}: it was started anew, or a balancer stands before several; name each by its own address")
    return await asyncio.to_thread(Tokenizer, spec)


def _matches(engine: EngineDescription, description: ServiceDescription) -> bool:
    try:
        check_lane(engine, description)
    except FailedPreconditionError:
        return False
    return True
