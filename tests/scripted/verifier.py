"""A scripted verifier: the whole protocol of rounds, slots, blocks and sessions over a scripted target; no torch, no gRPC."""

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specwire.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError, UnsupportedError
from specwire.messages import (
    FeatureHandle,
    FeatureSet,
    Hello,
    RowStatus,
    ServiceDescription,
    SlotRef,
    TokenizerSpec,
    TokenLogprobs,
    VerifyCost,
    VerifyOpen,
    VerifyResult,
    VerifyRound,
    VerifyRow,
    VerifyRowResult,
    Welcome,
)
from tests.scripted.prefix_cache import PrefixCache
from tests.scripted.target import Prefix, Target, scripted_logprobs

STALE = VerifyRowResult(RowStatus.STALE)
_NO_COST = VerifyCost()


@dataclass
class VerifierScript:
    """How a scripted verifier behaves; fields may be changed while it runs.

    delay_s: what a round takes. is_bad(open, index): the row that samples this index has NaN logits.
    verify_cost: as Describe says. tells_times: answers say when the round ran (in process only).
    num_blocks: as Describe says; num_usable_blocks: what rows really get, to force preemption. lose_rows(round number, row): answer STALE.
    """

    vocab_size: int = 1000
    alphabet: tuple[int, ...] = tuple(range(3, 1000))
    eos_token_ids: tuple[int, ...] = (2,)
    max_model_len: int = 512
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128
    max_num_draft_tokens: int = 8
    max_outstanding_rounds: int = 2
    block_size: int = 4
    num_blocks: int = 2048
    num_usable_blocks: int | None = None
    prefix_caching: bool = True
    model_id: str = "scripted"
    weights_hash: str = "weights"
    dtype: str = "float32"
    numerics_version: str = "1"
    rejection_sample_method: str = "strict"
    tokenizer: TokenizerSpec | None = None
    instance_id: str = ""  # a new one for each verifier
    delay_s: float | Callable[[VerifyRound], float] = 0.0
    is_bad: Callable[[VerifyOpen, int], bool] | None = None
    lose_row: Callable[[int, VerifyRow], bool] | None = None
    max_message_bytes: int = 64 << 20
    verify_cost: VerifyCost = _NO_COST
    tells_times: bool = False
    feature_sets: tuple[FeatureSet, ...] = ()  # says where the features of its slots would be; block ids tell the generation


@dataclass
class _Slot:
    open: VerifyOpen
    prefix: Prefix
    num_computed: int
    num_cached: int
    last_round: int = 0
    num_blocks: int = 0
    is_dead: bool = False  # closed before its round was launched
    is_bad: bool = False
    may_follow: bool = False  # the last row that ran sampled and had no drafts
    generation: int = 0
    num_told_blocks: int = 0


@dataclass
class Session:
    """One Verify stream: its queue of received rounds and its slots."""

    hello: Hello
    max_outstanding_rounds: int
    queue: deque[VerifyRound] = field(default_factory=deque)
    slots: dict[int, _Slot] = field(default_factory=dict)
    closed_early: set[SlotRef] = field(default_factory=set)
    closed: set[SlotRef] = field(default_factory=set)
    last_round: int = 0
    num_unanswered: int = 0
    is_over: bool = False
    on_taken_over: Callable[[], None] = lambda: None


class ScriptedVerifier:
    """Receives rounds (`receive`), launches them one by one (`launch`); what uses it sends the answers (`answered`), script.delay_s after the
    launch. Raises what a stream would end with."""

    def __init__(self, script: VerifierScript | None = None) -> None:
        self.script = script or VerifierScript()
        self.target = Target(self.script.alphabet)
        self.instance_id = self.script.instance_id or uuid.uuid4().hex
        self.is_draining = False
        self.session: Session | None = None
        self.num_blocks_used = 0
        self.num_rounds = 0
        self.num_rows = 0
        self.num_tokens = 0  # that were computed
        self.num_stray_rows = 0  # rows of slots that their own coordinator had closed
        self.received: deque[VerifyRound] = deque(maxlen=10_000)
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._cache = PrefixCache(self.script.block_size)
        self._num_generations = 0

    @property
    def num_blocks(self) -> int:
        return self.script.num_blocks if self.script.num_usable_blocks is None else self.script.num_usable_blocks

    def describe(self) -> ServiceDescription:
        script = self.script
        return ServiceDescription(
            model_id=script.model_id, instance_id=self.instance_id, vocab_size=script.vocab_size, max_model_len=script.max_model_len,
            max_num_draft_tokens=script.max_num_draft_tokens, max_num_seqs=script.max_num_seqs, weights_hash=script.weights_hash,
            tokenizer_fingerprint=script.tokenizer.fingerprint if script.tokenizer else "",
            dtype=script.dtype, numerics_version=script.numerics_version, device="cpu",
            block_size=script.block_size, num_blocks=script.num_blocks, eos_token_ids=script.eos_token_ids,
            max_num_batched_tokens=script.max_num_batched_tokens, max_message_bytes=script.max_message_bytes,
            rejection_sample_method=script.rejection_sample_method, verify_cost=script.verify_cost, feature_sets=script.feature_sets,
        )  # fmt: skip

    def tokenizer(self) -> TokenizerSpec:
        if self.script.tokenizer is None:
            raise UnsupportedError("this verifier has no tokenizer")
        return self.script.tokenizer

    def open_session(self, hello: Hello) -> tuple[Session, Welcome]:
        """Takes over from an equal id's session of no higher incarnation; refuses anyone else while a session lives."""
        if self.is_draining:
            raise UnavailableError("the verifier is stopping; use another one")
        held = self.session
        if held is not None and not held.is_over:
            if held.hello.coordinator_id != hello.coordinator_id:
                raise FailedPreconditionError(
                    f"held by coordinator {held.hello.coordinator_id!r}; {hello.coordinator_id!r} must wait until it leaves"
                )
            if hello.incarnation < held.hello.incarnation:
                raise FailedPreconditionError(f"incarnation {hello.incarnation} is older than {held.hello.incarnation}, which holds this verifier")
            self.end_session(held)
            held.on_taken_over()
        self.session = Session(hello, min(hello.max_outstanding_rounds, self.script.max_outstanding_rounds))
        welcome = Welcome(self.instance_id, self.session.max_outstanding_rounds, self.num_blocks - self.num_blocks_used)
        return self.session, welcome

    def end_session(self, session: Session) -> None:
        session.is_over = True
        session.queue.clear()
        for slot in session.slots.values():
            self.num_blocks_used -= slot.num_blocks
        session.slots.clear()

    def receive(self, session: Session, message: VerifyRound) -> None:
        """Queues a round; its closes take effect at the first round that is not launched yet."""
        if message.round <= session.last_round:
            raise InvalidArgumentError(f"round {message.round} follows round {session.last_round}; rounds must ascend")
        if session.num_unanswered >= session.max_outstanding_rounds:
            raise FailedPreconditionError(f"round {message.round} is one more than the {session.max_outstanding_rounds} that may be outstanding")
        session.last_round = message.round
        session.num_unanswered += 1
        self.received.append(message)
        session.closed.update(message.closes)
        self.num_stray_rows += sum(SlotRef(row.slot, row.epoch) in session.closed for row in message.rows)
        for close in message.closes:
            slot = session.slots.get(close.slot)
            if slot is not None and slot.open.epoch == close.epoch:
                slot.is_dead = True
            elif any(open_.slot == close.slot and open_.epoch == close.epoch for queued in session.queue for open_ in queued.opens):
                session.closed_early.add(close)
        session.queue.append(message)

    def launch(self, session: Session) -> VerifyResult:
        """Runs the oldest queued round."""
        message = session.queue.popleft()
        self.num_rounds += 1
        self.num_rows += len(message.rows)
        for index in [index for index, slot in session.slots.items() if slot.is_dead]:
            self.num_blocks_used -= session.slots.pop(index).num_blocks
        opened, num_tokens = [self._open(session, open_) for open_ in message.opens], self.num_tokens
        rows = [self._run(session, message.round, row) for row in message.rows]
        block_size = self.script.block_size
        promised = sum(-(-(row.token_budget or 1 + len(row.draft_tokens)) // block_size) + 1 for queued in session.queue for row in queued.rows)
        features = self._features(session, message, rows) if self.script.feature_sets else []
        return VerifyResult(
            message.session, message.lane, message.round, rows, self.num_blocks - self.num_blocks_used, promised, features=features,
            opened_num_cached_tokens=opened, num_padded_tokens=self.num_tokens - num_tokens,
        )  # fmt: skip

    def _features(self, session: Session, message: VerifyRound, rows: list[VerifyRowResult]) -> list[FeatureHandle]:
        """What is new of the rows that ran; a handle's address is that of the whole verifier, told once for each opening."""
        handles = []
        for row, answer in zip(message.rows, rows, strict=True):
            slot = session.slots.get(row.slot)
            if answer.status is not RowStatus.OK or slot is None or (slot.num_blocks == slot.num_told_blocks and not row.token_budget):
                continue
            new = [slot.generation * 10_000 + number for number in range(slot.num_told_blocks, slot.num_blocks)]
            source, slot.num_told_blocks = "" if slot.num_told_blocks else f"memory of {self.instance_id}", slot.num_blocks
            handles.append(FeatureHandle(message.session, row.slot, row.epoch, "", source, new, 0, slot.num_computed, slot.generation, 0))
        return handles

    def answered(self, session: Session) -> None:
        """The oldest launched round's answer is on its way: one more may be sent."""
        session.num_unanswered -= 1

    def _open(self, session: Session, open_: VerifyOpen) -> int:
        if open_.slot in session.slots:
            raise InvalidArgumentError(f"slot {open_.slot} is opened with epoch {open_.epoch}, but is live; close it first")
        if not open_.token_ids or len(open_.token_ids) >= self.script.max_model_len:
            raise InvalidArgumentError(f"slot {open_.slot} opens with {len(open_.token_ids)} tokens, but 1 to {self.script.max_model_len - 1} fit")
        if len(session.slots) >= self.script.max_num_seqs:
            raise InvalidArgumentError(f"slot {open_.slot} is one more than max_num_seqs = {self.script.max_num_seqs}")
        prefix = Prefix(open_.noise_key, open_.choice, open_.token_ids)
        num_cached = self._cache.num_cached(open_) if self.script.prefix_caching else 0
        self._num_generations += 1
        slot = session.slots[open_.slot] = _Slot(open_, prefix, num_cached, num_cached, generation=self._num_generations)
        close = SlotRef(open_.slot, open_.epoch)
        slot.is_dead = close in session.closed_early
        session.closed_early.discard(close)
        return num_cached

    def _run(self, session: Session, round_: int, row: VerifyRow) -> VerifyRowResult:
        slot = session.slots.get(row.slot)
        if slot is None or slot.is_dead or slot.open.epoch != row.epoch or row.parent_round != slot.last_round:
            return STALE
        if self.script.lose_row is not None and self.script.lose_row(round_, row):
            return STALE
        if slot.is_bad:
            return VerifyRowResult(RowStatus.BAD, error="the slot went bad in an earlier round")
        return self._prefill(slot, round_, row) if row.token_budget else self._decode(slot, round_, row)

    def _prefill(self, slot: _Slot, round_: int, row: VerifyRow) -> VerifyRowResult:
        if row.base_len or row.first_token != -1 or row.draft_tokens or row.from_round:
            return VerifyRowResult(RowStatus.BAD, error=f"{row} is neither a prefill row nor a decode row")
        num_known = len(slot.open.token_ids)
        if not slot.last_round and self.script.prefix_caching:
            slot.num_cached = slot.num_computed = self._cache.num_cached(slot.open)
        num_tokens = max(0, min(row.token_budget, num_known - slot.num_computed))
        if not self._reserve(slot, slot.num_computed + num_tokens):
            return VerifyRowResult(RowStatus.OUT_OF_BLOCKS, slot.num_computed, slot.num_cached)
        slot.last_round = round_
        self.num_tokens += num_tokens
        slot.num_computed += num_tokens
        slot.may_follow = False
        if num_tokens == 0 or slot.num_computed < num_known:
            return VerifyRowResult(RowStatus.OK, slot.num_computed, slot.num_cached)
        self._cache.add(slot.open)
        return self._emit(slot, [])

    def _decode(self, slot: _Slot, round_: int, row: VerifyRow) -> VerifyRowResult:
        prefix, drafts = slot.prefix, row.draft_tokens
        if slot.num_computed < len(prefix) - 1:
            return VerifyRowResult(RowStatus.BAD, error=f"a decode row, but {len(prefix) - slot.num_computed} known tokens are not computed")
        if row.base_len != len(prefix):
            return VerifyRowResult(RowStatus.BAD, error=f"base_len is {row.base_len}, but the sequence has {len(prefix)} tokens")
        if row.from_round and (row.from_round != slot.last_round or not slot.may_follow or drafts or row.first_token != -1):
            return VerifyRowResult(RowStatus.BAD, error=f"FROM_ROUND({row.from_round}) after round {slot.last_round} is not possible")
        if not row.from_round and row.first_token != prefix.token_ids[-1]:
            return VerifyRowResult(RowStatus.BAD, error=f"first_token is {row.first_token}, but the sequence ends with {prefix.token_ids[-1]}")
        if len(drafts) > self.script.max_num_draft_tokens or any(not 0 <= token < self.script.vocab_size for token in drafts):
            return VerifyRowResult(RowStatus.BAD, error=f"drafts {drafts} are too many or outside the vocabulary")
        if row.base_len + len(drafts) + 1 > self.script.max_model_len:
            return VerifyRowResult(RowStatus.BAD, error=f"a row of {len(drafts)} drafts after {row.base_len} tokens leaves the context")
        if not self._reserve(slot, row.base_len + len(drafts)):
            return VerifyRowResult(RowStatus.OUT_OF_BLOCKS, slot.num_computed, slot.num_cached)
        slot.last_round = round_
        self.num_tokens += 1 + len(drafts)
        return self._emit(slot, drafts)

    def _emit(self, slot: _Slot, drafts: list[int]) -> VerifyRowResult:
        prefix, script, token_ids = slot.prefix, self.script, []
        logprobs: list[TokenLogprobs] | None = None if slot.open.sampling.logprobs is None else []
        for draft in [*drafts, -1]:
            if script.is_bad is not None and script.is_bad(slot.open, len(prefix)):
                slot.is_bad = True
                return VerifyRowResult(RowStatus.BAD, error=f"logits of position {len(prefix) - 1} are not finite")
            token = self.target.sample(prefix.state)
            if logprobs is not None:
                logprobs.append(scripted_logprobs(prefix.state, token, slot.open.sampling.logprobs or 0))
            prefix.append(token)
            token_ids.append(token)
            if token != draft:
                break
        slot.num_computed = len(prefix) - 1
        slot.may_follow = not drafts
        self.num_draft_tokens += len(drafts)
        self.num_accepted_tokens += len(token_ids) - 1
        return VerifyRowResult(RowStatus.OK, slot.num_computed, slot.num_cached, len(token_ids) - 1, token_ids, logprobs)

    def _reserve(self, slot: _Slot, num_tokens: int) -> bool:
        num_new = -(-num_tokens // self.script.block_size) - slot.num_blocks
        if num_new > self.num_blocks - self.num_blocks_used:
            return False
        if num_new > 0:
            slot.num_blocks += num_new
            self.num_blocks_used += num_new
        return True
