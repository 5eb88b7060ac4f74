"""A worker over a scripted method, and what tests send to it."""

import queue

from drafter_svc.session import Session
from drafter_svc.worker import Worker
from specwire.errors import SpecwireError
from specwire.messages import DraftResult, DraftRound, DraftRow
from tests.drafter.helpers import ScriptedMethod, open_request

Inbox = queue.Queue[DraftResult | SpecwireError | None]


class Harness:
    def __init__(self, method: ScriptedMethod) -> None:
        self.worker = Worker(lambda: method, max_num_seqs=16, chunk=32, cost_budget_s=0)
        self.worker.start()
        assert self.worker.ready.result(10) is method

    def session(self, label: str) -> tuple[Session, Inbox]:
        inbox: Inbox = queue.Queue()
        return self.worker.open_session(label, inbox.put), inbox

    def stop(self) -> None:
        assert self.worker.stop(10)


def first_round(number: int = 1, lane: int = 0) -> DraftRound:
    return DraftRound(1, lane, number, opens=[open_request([10, 20])], rows=[DraftRow(0, 1, 2, 2)])


def result(inbox: Inbox) -> DraftResult:
    item = inbox.get(timeout=60)
    assert isinstance(item, DraftResult)
    return item
