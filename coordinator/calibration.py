"""What all lanes learn together: how much drafters' scores are worth. Kept in a file across restarts where one is configured."""

import asyncio
import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from specwire.messages import ServiceDescription
from specwire.policy.calibration import CalibrationStatistics, Calibrator
from specwire.policy.calibration_file import load_calibration, save_calibration
from specwire.policy.capacity import EngineDescription

if TYPE_CHECKING:
    from .admission import Admission

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How old what is exported may be."""
_SAVE_S = 60.0
_COMPARING = ("strict", "synthetic")
_MAX_KINDS = 31
"""Kinds of drafters that are told apart; later ones share one, so that no fleet of ever new models fills memory and file."""
_OTHERS = "others"


class Calibration:
    """The lanes' calibrator. Everything runs in the event loop, but for writing the file.

    Args:
        config: names the file.
        engine: says which target the scores are about, and for how many positions there are drafts.

    Attributes:
        statistics: how well confidences hit, as of the last second.
    """

    def __init__(self, config: CoordinatorConfig, engine: EngineDescription) -> None:
        self.calibrator = Calibrator(engine.num_speculative_tokens)
        self.statistics: tuple[CalibrationStatistics, ...] = ()
        self._path = Path(config.calibration_file) if config.calibration_file else None
        self._models = f"{engine.model_id} {engine.verifier.weights_hash}".strip()
        self._kinds: dict[str, tuple[int, int]] = {}
        self._num_saved = 0.0
        self._following: asyncio.Task[None] | None = None
        if self._path is not None:
            load_calibration(self._path, self.calibrator, self._models)
            self._num_saved = self._num_counted

    def kind(self, drafter: ServiceDescription) -> tuple[int, int]:
        """`Calibrator.group` of a drafter's drafts, for sampled and for greedy sequences."""
        name = " ".join(filter(None, (drafter.method, drafter.model_id)))
        if name not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                name = _OTHERS
            self._kinds[name] = self.calibrator.group(name, is_greedy=False), self.calibrator.group(name, is_greedy=True)
        return self._kinds[name]

    def start(self) -> None:
        """Begins to look after statistics and file."""
        self._following = asyncio.create_task(self._follow())

    def look(self) -> None:
        """Brings the statistics up to date."""
        self.statistics = tuple(self.calibrator.statistics())

    async def stop(self) -> None:
        """Writes the file a last time."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._save()

    async def _follow(self) -> None:
        num_looks = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            num_looks += 1
            try:
                self.look()
                if num_looks * _LOOK_S >= _SAVE_S:
                    num_looks = 0
                    await self._save()
            except Exception:
                logger.exception("a fault while calibration was looked after; it goes on")

    async def _save(self) -> None:
        """Only if something was learned since the last time; a copy goes to the thread that writes, and the step goes on with the original."""
        if self._path is not None and self._num_counted != self._num_saved:
            self._num_saved = self._num_counted
            await asyncio.to_thread(save_calibration, self._path, copy.deepcopy(self.calibrator), self._models)

    @property
    def _num_counted(self) -> float:
        return float(self.calibrator.trials.sum())


def need_calibration(admission: "Admission", engine: EngineDescription) -> None:
    """Makes it, if nothing needed it before."""
    if admission.calibration is None:
        admission.calibration = Calibration(admission.config, engine)
        admission.calibration.start()


def check_acceptance(verifier: ServiceDescription) -> None:
    """Raise FailedPreconditionError unless which drafts are verified can't change what is emitted.

    That is so where a draft is accepted if it equals the target's own token. A ratio test would make tokens likelier that are verified oftener,
    and what is verified depends on the drafts' scores.
    """
    if verifier.rejection_sample_method not in _COMPARING:
        raise FailedPreconditionError(
            f"its rejection_sample_method is {verifier.rejection_sample_method!r}, but enable_adaptive_verification chooses drafts by their scores, "
            "which changes what a ratio test emits; use strict there, or leave enable_adaptive_verification out"
        )
