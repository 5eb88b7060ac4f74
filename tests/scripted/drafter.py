"""A scripted drafter: the whole protocol of sessions, slots and rounds; its drafts match the scripted target as often as asked."""

import random
import uuid
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from specwire.errors import InvalidArgumentError, UnavailableError
from specwire.messages import (
    DraftCost,
    DraftOpen,
    DraftResult,
    DraftRound,
    DraftRow,
    DraftRowResult,
    FeatureHandle,
    FeatureSet,
    RowStatus,
    ServiceDescription,
    SlotRef,
)
from tests.scripted.target import Prefix, Target

GARBAGE = ("wrong_tokens", "out_of_vocabulary", "negative", "too_many", "unknown_slots", "wrong_epoch", "wrong_base_len", "nan", "doubled", "no_rows")


@dataclass
class DrafterScript:
    """How a scripted drafter behaves; fields may be changed while it runs.

    acceptance: share of drafts that equal the target's token, drawn by a hash of the prefix; or that of a sequence. garbage: kinds of broken
    replies, one drawn for each reply. num_catch_up_rounds: rows after an Open that are answered CATCHING_UP. delay_s: what a reply takes.
    score(is right, position): of a draft; None = such a row has none.
    tells_times: answers say when they were made (in process only).
    """

    vocab_size: int = 1000
    alphabet: tuple[int, ...] = tuple(range(3, 1000))
    max_model_len: int = 512
    max_num_seqs: int = 64
    max_num_draft_tokens: int = 16
    tokenizer_fingerprint: str = ""
    instance_id: str = ""  # a new one for each drafter
    method: str = "scripted"
    acceptance: float | Callable[[DraftOpen], float] = 1.0
    num_catch_up_rounds: int = 0
    garbage: tuple[str, ...] = ()
    delay_s: float | Callable[[DraftRound], float] = 0.0
    draft_cost: tuple[DraftCost, ...] = ()
    draft_chunk_ms: float = 0.0
    score: Callable[[bool, int], float | None] = lambda is_right, position: 0.5
    tells_times: bool = False
    max_message_bytes: int = 64 << 20
    feature_sets: tuple[FeatureSet, ...] = ()  # what it needs: it drafts only where it was told of all features
    feature_block_size: int = 4  # the verifiers'


@dataclass
class _Slot:
    open: DraftOpen
    prefix: Prefix
    num_rounds: int = 0
    features: list[FeatureHandle] = field(default_factory=list)


@dataclass
class DraftSession:
    """One Draft stream."""

    slots: dict[int, _Slot] = field(default_factory=dict)
    last_round: int = 0


class ScriptedDrafter:
    """Answers one round at a time."""

    def __init__(self, script: DrafterScript | None = None, seed: int = 0) -> None:
        self.script = script or DrafterScript()
        self.target = Target(self.script.alphabet)
        self.instance_id = self.script.instance_id or uuid.uuid4().hex
        self.is_draining = False
        self.num_open = 0
        self.num_rows = 0
        self.num_rounds = 0
        self.num_handles = 0
        self.num_rows_without_features = 0  # which would have to answer CATCHING_UP for ever
        self._sessions: list[DraftSession] = []
        self._random = random.Random(seed)

    def describe(self) -> ServiceDescription:
        script = self.script
        return ServiceDescription(
            model_id="scripted-draft", instance_id=self.instance_id, vocab_size=script.vocab_size, max_model_len=script.max_model_len,
            max_num_draft_tokens=script.max_num_draft_tokens, max_num_seqs=script.max_num_seqs, tokenizer_fingerprint=script.tokenizer_fingerprint,
            method=script.method, draft_cost=script.draft_cost, max_message_bytes=script.max_message_bytes, feature_sets=script.feature_sets,
            draft_chunk_ms=script.draft_chunk_ms,
        )  # fmt: skip

    def open_session(self) -> DraftSession:
        if self.is_draining:
            raise UnavailableError("the drafter is stopping; use another one")
        self._sessions.append(DraftSession())
        return self._sessions[-1]

    def forget(self) -> None:
        """Loses all sequences, though its streams go on: their rows are answered STALE."""
        for session in self._sessions:
            self.end_session(session)

    def end_session(self, session: DraftSession) -> None:
        self.num_open -= len(session.slots)
        session.slots.clear()

    def answer(self, session: DraftSession, message: DraftRound) -> DraftResult | None:
        """None where the round has no rows."""
        if message.round <= session.last_round:
            raise InvalidArgumentError(f"round {message.round} follows round {session.last_round}; rounds must ascend")
        session.last_round = message.round
        self.num_rounds += 1
        self.num_rows += len(message.rows)
        for close in message.closes:
            self._close(session, close)
        for open_ in message.opens:
            if open_.slot in session.slots:
                raise InvalidArgumentError(f"slot {open_.slot} is opened, but is live; close it first")
            if self.num_open >= self.script.max_num_seqs:
                raise InvalidArgumentError(f"slot {open_.slot} is one more than max_num_seqs = {self.script.max_num_seqs}")
            self.num_open += 1
            session.slots[open_.slot] = _Slot(open_, Prefix(open_.noise_key, open_.choice, open_.token_ids))
        for commit in message.commits:
            slot = session.slots.get(commit.slot)
            if slot is not None and slot.open.epoch == commit.epoch and len(slot.prefix) == commit.base_len:
                for token in commit.token_ids:
                    slot.prefix.append(token)
        for handle in message.features:
            assert self.script.feature_sets, "a drafter that needs no features was told of some"
            slot = session.slots[handle.slot]
            assert slot.open.epoch == handle.epoch, f"{handle} of epoch {slot.open.epoch}"
            slot.features.append(handle)
            self.num_handles += 1
        if not message.rows:
            return None
        rows = [self._draft(session, row) for row in message.rows]
        if self.script.garbage:
            rows = self._spoil(rows, self._random.choice(self.script.garbage))
        return DraftResult(message.session, message.lane, message.round, rows)

    def _close(self, session: DraftSession, close: SlotRef) -> None:
        slot = session.slots.get(close.slot)
        if slot is not None and slot.open.epoch == close.epoch:
            del session.slots[close.slot]
            self.num_open -= 1

    def _draft(self, session: DraftSession, row: DraftRow) -> DraftRowResult:
        slot = session.slots.get(row.slot)
        if slot is None or slot.open.epoch != row.epoch or len(slot.prefix) != row.base_len:
            return DraftRowResult(RowStatus.STALE, row.slot, row.epoch, row.base_len)
        if row.base_len + row.num_drafts > self.script.max_model_len or row.num_drafts > self.script.max_num_draft_tokens:
            error = f"{row.num_drafts} drafts after {row.base_len} tokens do not fit"
            return DraftRowResult(RowStatus.BAD, row.slot, row.epoch, row.base_len, error=error)
        if self.script.feature_sets and not self._has_features(slot):
            self.num_rows_without_features += 1
            return DraftRowResult(RowStatus.CATCHING_UP, row.slot, row.epoch, row.base_len)
        slot.num_rounds += 1
        if slot.num_rounds <= self.script.num_catch_up_rounds:
            return DraftRowResult(RowStatus.CATCHING_UP, row.slot, row.epoch, row.base_len)
        prefix, drafts, alphabet = slot.prefix, [], self.script.alphabet
        scores: list[float | None] = []
        given_share = self.script.acceptance
        share = given_share(slot.open) if callable(given_share) else given_share
        for position in range(row.num_drafts):
            token = right = self.target.sample(prefix.state)
            if hash((prefix.state, 2)) % 1000 >= share * 1000:
                token = alphabet[hash((prefix.state, 3)) % len(alphabet)]
            drafts.append(token)
            scores.append(self.script.score(token == right, position))
            prefix.append(token)
        prefix.truncate(row.base_len)
        given = [score for score in scores if score is not None]
        return DraftRowResult(RowStatus.OK, row.slot, row.epoch, row.base_len, drafts, array("f", given if len(given) == len(drafts) else []))

    def _has_features(self, slot: _Slot) -> bool:
        """Whether it was told of one place, and of all its blocks in order, that hold n - 1 features of n tokens; asserts what may never be."""
        handles = slot.features
        if not handles:
            return False
        blocks = [block for handle in handles for block in handle.new_block_ids]
        generation = handles[0].generation
        assert {handle.generation for handle in handles} == {generation}, f"a slot of the drafter was told of two places: {handles}"
        assert blocks == [generation * 10_000 + number for number in range(len(blocks))], f"blocks are missing or told twice: {handles}"
        assert [bool(handle.source) for handle in handles] == [True, *[False] * (len(handles) - 1)], f"the source is told once: {handles}"
        assert handles[0].address, f"nobody can be asked: {handles[0]}"
        num_tokens = len(slot.prefix)
        assert max(handle.num_positions for handle in handles) <= num_tokens, f"{num_tokens} tokens, but {handles}"
        return len(blocks) * self.script.feature_block_size >= num_tokens - 1

    def _spoil(self, rows: list[DraftRowResult], kind: str) -> list[DraftRowResult]:
        vocab_size = self.script.vocab_size
        match kind:
            case "wrong_tokens":
                return [row._replace(draft_tokens=[self._random.randrange(vocab_size) for _ in row.draft_tokens]) for row in rows]
            case "out_of_vocabulary":
                return [row._replace(draft_tokens=[vocab_size + 7 for _ in row.draft_tokens]) for row in rows]
            case "negative":
                return [row._replace(draft_tokens=[-1 for _ in row.draft_tokens]) for row in rows]
            case "too_many":
                return [row._replace(draft_tokens=row.draft_tokens * 40, confidences=row.confidences * 40) for row in rows]
            case "unknown_slots":
                return [row._replace(slot=row.slot + 10_000) for row in rows]
            case "wrong_epoch":
                return [row._replace(epoch=row.epoch + 1) for row in rows]
            case "wrong_base_len":
                return [row._replace(base_len=row.base_len + 1) for row in rows]
            case "nan":
                return [row._replace(confidences=array("f", [float("nan")]) * len(row.confidences)) for row in rows]
            case "doubled":
                return rows + rows
        assert kind == "no_rows", f"unknown kind of garbage {kind!r}"
        return []
