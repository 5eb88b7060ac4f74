"""The sequences of one stream: slots in their lives, and which rows of a round may be drafted for. Knows no threads and no gRPC."""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.messages import DraftCommit, DraftOpen, DraftResult, DraftRound, DraftRow, DraftRowResult, FeatureHandle, RowStatus, SlotRef

from .method import Ask, Drafts, Method

logger = logging.getLogger(__name__)

_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""


class SequencePool:
    """Numbers for the open sequences of all sessions, at most max_num_seqs at once."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Sequences that may still be opened."""
        return len(self._free)

    def take(self) -> int | None:
        """A number, or None where all are taken."""
        return self._free.pop() if self._free else None

    def give(self, seq_id: int) -> None:
        self._free.append(seq_id)


class _Slot:
    """One life of a slot. A slot that can't be drafted for has no sequence, but a reason that its rows are answered with."""

    __slots__ = ("epoch", "num_tokens", "problem", "seq_id")

    def __init__(self, epoch: int, num_tokens: int, seq_id: int = -1, problem: tuple[RowStatus, str] | None = None) -> None:
        self.epoch = epoch
        self.num_tokens = num_tokens
        self.seq_id = seq_id
        self.problem = problem


class Session:
    """One stream's slots. Rows that are wrong are answered so; only a message that no row can answer for raises.

    Args:
        label: names the stream in logs.
        method: owns the sequences.
        pool: shared by all sessions of the service.
        deliver: takes each answer (None for a message that has none, an error that ends the stream); called by the worker.
    """

    def __init__(
        self, label: str, method: Method, pool: SequencePool, deliver: Callable[[DraftResult | SpecwireError | None], None] = lambda _: None
    ) -> None:
        self.label = label
        self.deliver = deliver
        self.counts: Counter[str] = Counter()
        self.closed = False
        self._method = method
        self._features = method.features
        self._pool = pool
        self._slots: dict[int, _Slot] = {}

    @property
    def num_slots(self) -> int:
        """Live slots, also those that can't be drafted for."""
        return len(self._slots)

    def apply(self, message: DraftRound) -> None:
        """Closes, then opens, then commits, then where features are.

        Raises:
            InvalidArgumentError: a slot was opened that is live.
        """
        for close in message.closes:
            self._close(close)
        for request in message.opens:
            self._open(request)
        for commit in message.commits:
            self._commit(commit)
        for handle in message.features:
            self._note(handle)

    def plan(self, rows: Sequence[DraftRow]) -> list[Ask | DraftRowResult]:
        """For each row what to ask of the method, or the answer where there is nothing to ask."""
        seen: set[int] = set()
        slots, plans = self._slots, list[Ask | DraftRowResult]()
        for row in rows:
            index, epoch, base_len, num_drafts, _ = row
            slot = slots.get(index)
            if (
                slot is not None and slot.epoch == epoch and slot.num_tokens == base_len
                and slot.problem is None and index not in seen and num_drafts >= 0
            ):  # fmt: skip
                seen.add(index)
                plans.append(_new(Ask, (slot.seq_id, num_drafts)))
            else:
                plans.append(self._refusal(row, slot))
        return plans

    def answer(self, rows: Sequence[DraftRow], plans: Sequence[Ask | DraftRowResult], drafts: Iterator[Drafts]) -> list[DraftRowResult]:
        """The answers to rows that were planned so, where drafts has the next one for each `Ask`."""
        results: list[DraftRowResult] = []
        statuses: list[RowStatus] = []
        for row, plan in zip(rows, plans, strict=True):
            if isinstance(plan, Ask):
                status, token_ids, scores, _ = next(drafts)
                statuses.append(status)
                results.append(_new(DraftRowResult, (status, *row[:3], token_ids, array("f", scores), "")))
            else:
                results.append(plan)
        self.counts.update([status.name for status in statuses if status is not RowStatus.OK])
        self.counts[RowStatus.OK.name] += statuses.count(RowStatus.OK)
        return results

    def close(self) -> None:
        """Frees all sequences; does nothing the second time."""
        if not self.closed:
            self.closed = True
            for slot in self._slots.values():
                self._release(slot)
            self._slots.clear()
            logger.info("%s ended: %s", self.label, ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())) or "no rows")

    def _open(self, request: DraftOpen) -> None:
        if request.slot in self._slots:
            raise InvalidArgumentError(
                f"slot {request.slot} is opened with epoch {request.epoch}, but its epoch {self._slots[request.slot].epoch} is live; close it first"
            )
        slot = self._slots[request.slot] = _Slot(request.epoch, len(request.token_ids))
        seq_id = self._pool.take()
        if seq_id is None:
            limit = self._pool.max_num_seqs
            self._give_up(slot, request.slot, RowStatus.OUT_OF_BLOCKS, f"all {limit} sequences of this drafter are open; raise its max_num_seqs")
            return
        try:
            self._method.open(seq_id, request)
        except InvalidArgumentError as error:
            self._pool.give(seq_id)
            self._give_up(slot, request.slot, RowStatus.BAD, str(error))
        else:
            slot.seq_id = seq_id

    def _commit(self, commit: DraftCommit) -> None:
        slot = self._slots.get(commit.slot)
        if slot is None or slot.epoch != commit.epoch or slot.num_tokens != commit.base_len:
            # Its rows are answered STALE until the sequence is opened again.
            self.counts["ignored commits"] += 1
            return
        slot.num_tokens += len(commit.token_ids)
        if slot.problem is not None:
            return
        try:
            self._method.append(slot.seq_id, commit.token_ids)
        except InvalidArgumentError as error:
            self._release(slot)
            self._give_up(slot, commit.slot, RowStatus.BAD, str(error))
            return
        if self._features is not None:
            self._features.grew(slot.seq_id, slot.num_tokens - 1)

    def _note(self, handle: FeatureHandle) -> None:
        slot = self._slots.get(handle.slot)
        if self._features is not None and slot is not None and slot.epoch == handle.epoch and slot.problem is None:
            self._features.note(slot.seq_id, handle)

    def _close(self, close: SlotRef) -> None:
        slot = self._slots.get(close.slot)
        if slot is not None and slot.epoch == close.epoch:
            self._release(self._slots.pop(close.slot))

    def _release(self, slot: _Slot) -> None:
        if slot.problem is None:
            self._method.close(slot.seq_id)
            self._pool.give(slot.seq_id)

    def _give_up(self, slot: _Slot, number: int, status: RowStatus, reason: str) -> None:
        slot.problem = (status, reason)
        logger.warning("%s: no drafts for slot %d: %s", self.label, number, reason)

    def _refusal(self, row: DraftRow, slot: _Slot | None) -> DraftRowResult:
        """The answer to a row that nothing is asked for."""
        if slot is None or slot.epoch != row.epoch or slot.num_tokens != row.base_len:
            known = "the slot is not open" if slot is None else f"epoch {slot.epoch} has {slot.num_tokens} tokens"
            return self._refuse(row, RowStatus.STALE, f"slot {row.slot}, epoch {row.epoch}, base_len {row.base_len}: {known}")
        if slot.problem is not None:
            return self._refuse(row, *slot.problem)
        if row.num_drafts < 0:
            return self._refuse(row, RowStatus.BAD, f"num_drafts is {row.num_drafts}, but must be 0 or more")
        return self._refuse(row, RowStatus.BAD, f"slot {row.slot} has two rows in this round; send one")

    def _refuse(self, row: DraftRow, status: RowStatus, reason: str) -> DraftRowResult:
        self.counts[status.name] += 1
        return DraftRowResult(status, row.slot, row.epoch, row.base_len, error=reason)
