"""One target under many conversations."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.descriptions import DescriptionsTarget
from tests.fuzz.pulls import PullTarget
from tests.fuzz.replies import RepliesTarget
from tests.fuzz.targets import CoordinatorTarget, DraftTarget, Target, VerifyTarget

TARGETS: dict[str, Callable[[], Target | RepliesTarget | DescriptionsTarget]] = {
    "Verify": VerifyTarget,
    "PullFeatures": PullTarget,
    "Draft": DraftTarget,
    "Generate": lambda: CoordinatorTarget("Generate"),
    "Session": lambda: CoordinatorTarget("Session"),
    "GenerateBatch": lambda: CoordinatorTarget("GenerateBatch"),
    "Session over real services": lambda: CoordinatorTarget("Session", is_real=True),
    "GenerateBatch over real services": lambda: CoordinatorTarget("GenerateBatch", is_real=True),
    "a verifier's answers": lambda: RepliesTarget("verifier"),
    "a drafter's answers": lambda: RepliesTarget("drafter"),
    "a verifier's description": lambda: DescriptionsTarget("verifier"),
    "a verifier's costs": lambda: DescriptionsTarget("verifier", adaptive=True),
    "a drafter's description": lambda: DescriptionsTarget("drafter"),
    "a drafter's costs": lambda: DescriptionsTarget("drafter", adaptive=True),
}


def fuzz(name: str, num_examples: int, number: int) -> None:
    """Checks a target that is started for it num_examples times; `number` decides with what. Raises what the first fault raises, with the
    smallest input that shows it."""
    target = TARGETS[name]()
    with tempfile.TemporaryDirectory(prefix="sw-") as folder, asyncio.Runner() as runner:
        service = target.serve(Path(folder))
        runner.run(service.__aenter__())
        try:
            _send(runner, target, num_examples, number)
        finally:
            runner.run(service.__aexit__(None, None, None))


def _send(runner: asyncio.Runner, target: Target | RepliesTarget | DescriptionsTarget, num_examples: int, number: int) -> None:
    @seed(number)
    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(target.strategy)
    def send(what: Any) -> None:
        runner.run(target.check(what))

    send()
