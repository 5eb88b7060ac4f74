"""One target under many conversations."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.strategies import Conversation, conversations
from tests.fuzz.targets import TARGETS


def fuzz(name: str, num_examples: int, number: int) -> None:
    """Sends num_examples conversations to a target that is started for them; `number` decides which. Raises what the first fault raises,
    with the smallest conversation that shows it."""
    target = TARGETS[name]()
    with tempfile.TemporaryDirectory(prefix="sw-") as folder, asyncio.Runner() as runner:
        service = target.serve(Path(folder))
        runner.run(service.__aenter__())
        try:
            _send(runner, target.check, conversations(target.good, target.most), num_examples, number)
        finally:
            runner.run(service.__aexit__(None, None, None))


def _send(runner: asyncio.Runner, check, strategy, num_examples: int, number: int) -> None:
    @seed(number)
    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def send(conversation: Conversation) -> None:
        runner.run(check(conversation))

    send()
