"""Several lookups side by side: of each sequence and step, the draft that more is expected of."""

import dataclasses
from collections.abc import Sequence

from specwire.engine.counts import PassCounts
from specwire.messages import DraftOpen

from .judge import best
from .method import Ask, Drafts, Method, open_all


class Combined:
    """Methods without a model that all know all sequences. Their scores must be on one scale; on ties the method named first goes first."""

    features = None
    num_free_blocks = 0

    def __init__(self, methods: Sequence[Method]) -> None:
        assert len(methods) > 1, f"{len(methods)} methods need no combination"
        self._methods = methods
        self.counts = PassCounts()
        parts = [method.description for method in methods]
        self.description = dataclasses.replace(
            parts[0], model_id="+".join(part.model_id for part in parts), method="+".join(part.method for part in parts)
        )

    def open(self, seq_id: int, request: DraftOpen) -> None:
        open_all(self._methods, seq_id, request)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        for method in self._methods:
            method.append(seq_id, token_ids)

    def close(self, seq_id: int) -> None:
        for method in self._methods:
            method.close(seq_id)

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        answers = [method.propose(asks) for method in self._methods]
        return [best(choices) for choices in zip(*answers, strict=True)]

    def catch_up(self, budget: int) -> int:
        return sum(method.catch_up(budget) for method in self._methods)
