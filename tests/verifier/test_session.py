"""What rounds leave behind in the event loop when they keep failing."""

import asyncio
import gc
from collections import deque
from concurrent.futures import Future

import pytest

from specwire.messages import Hello, VerifyResult, VerifyRound
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.session import SessionGate


class FailingWorker:
    """Every round fails, also those behind a failed one."""

    num_blocks = 8

    def run(self, request: VerifyRound, queued: deque[VerifyRound]) -> Future[VerifyResult]:
        answer: Future[VerifyResult] = Future()
        assert answer.set_running_or_notify_cancel()
        answer.set_exception(RuntimeError("device lost"))
        return answer

    def reset(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


@pytest.mark.parametrize("is_watched", [False, True])
async def test_no_failure_is_logged_as_forgotten(caplog: pytest.LogCaptureFixture, is_watched: bool) -> None:
    """Neither that of a second round of a stream, nor that of the verifier, which nobody waits for any more once it stops."""
    gate = SessionGate(FailingWorker(), "i", 2, VerifierMetrics())  # type: ignore[arg-type]  # as much of a worker as is used
    if is_watched:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(gate.broken), 0.001)
    for _ in range(5):
        session, _ = gate.enter(Hello("c", 1, 2))
        session.submit(VerifyRound(1, 0, 1))
        session.submit(VerifyRound(1, 0, 2))
        with pytest.raises(RuntimeError, match="device lost"):
            await anext(session.results())
        gate.leave(session)
    assert gate.broken.done()
    await asyncio.sleep(0)
    del session, gate
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
