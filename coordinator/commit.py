"""Commit: the only place where a sequence gets tokens. Applies a round's answers, row by row, and preempts where blocks ran out."""

from functools import partial
from typing import TYPE_CHECKING

from specwire.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from specwire.messages import ChoiceDelta, FinishReason, RowStatus, TokenOrigin, VerifyResult
from specwire.speculative_config import MAX_NUM_TOKENS

from .admission import MAX_SETBACKS
from .ending import end_sequence
from .features import note_features
from .sequence import Sequence
from .slots import Round, Slot

if TYPE_CHECKING:
    from .lane import Lane

_OK = RowStatus.OK
_PLAIN = bytes([TokenOrigin.PLAIN])
_RECOVERED = [bytes([TokenOrigin.ACCEPTED] * accepted + [TokenOrigin.RECOVERED]) for accepted in range(MAX_NUM_TOKENS)]
_BONUS = [bytes([TokenOrigin.ACCEPTED] * accepted + [TokenOrigin.BONUS]) for accepted in range(MAX_NUM_TOKENS + 1)]


def commit(lane: "Lane", round_: Round, result: VerifyResult) -> None:
    """Appends what was sampled, applies the stop rules and streams it; answers of ended or reopened sequences are dropped."""
    counters = lane.counters
    max_backlog = lane.admission.config.max_stream_backlog
    is_short_of_blocks = False
    outcomes = counters.outcomes
    now_ns = round_.plan.times.answered_ns
    lane.telemetry.answered(round_, result)
    lane.chunk_limit.answered(round_, result)
    counters.num_unbounded_rounds += lane.chunk_limit.is_blind and bool(round_.plan.chunks and round_.plan.decodes)
    gap, last_token_ns, num_alike = (0, 0), 0, 0  # of the row before: nearly all have the same
    gaps: dict[tuple[int, int], int] = {}  # (nanoseconds since the last tokens, number of new tokens) -> sequences
    for slot, num_cached_tokens in zip(round_.opened, result.opened_num_cached_tokens, strict=False):  # an older verifier says nothing of them
        slot.open_answered(num_cached_tokens)
    for slot, row, answer in zip(round_.slots, round_.rows, result.rows, strict=True):
        status, num_computed_tokens, num_cached_tokens, num_accepted, token_ids, logprobs, error = answer
        drafts = row.draft_tokens
        sequence = slot.sequence
        slot.num_in_flight -= 1
        if row.token_budget:
            slot.chunk_answered(row.token_budget, num_computed_tokens)
        elif not drafts:
            slot.num_ahead -= 1
        if sequence.is_finished or sequence.slot is not slot:
            counters.num_dropped_rows += 1
            continue
        if status is not _OK:
            is_short_of_blocks |= _fail_row(lane, slot, status, error)
            continue
        slot.last_ran_round = round_.number
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = num_cached_tokens
        if not token_ids:
            continue
        if len(token_ids) != num_accepted + 1 or num_accepted > len(drafts):
            raise InternalError(f"a row with {len(drafts)} drafts was answered with {num_accepted} accepted ones and {len(token_ids)} tokens")
        if slot.is_prefilling:
            slot.is_prefilling = False
            lane.telemetry.prefilled(sequence, now_ns)
        sequence.num_setbacks = 0
        sequence.num_steps += 1
        origins = _PLAIN
        if drafts:
            if sequence.draft_log is not None:
                sequence.draft_log.add(sequence, drafts, num_accepted)
            num_drafts = len(drafts)
            sequence.num_draft_tokens += num_drafts
            sequence.accept_counts[num_accepted] += 1
            outcomes[num_drafts][num_accepted] += 1
            origins = _BONUS[num_accepted] if num_accepted == num_drafts else _RECOVERED[num_accepted]
        num_taken, reason, stop_cause, text = sequence.rules.push(token_ids)
        if num_taken < len(token_ids):
            token_ids, origins = token_ids[:num_taken], origins[:num_taken]
            logprobs = None if logprobs is None else logprobs[:num_taken]
        sequence.token_ids += token_ids
        if sequence.first_token_ns:
            if sequence.last_token_ns != last_token_ns or num_taken != num_alike:
                last_token_ns, num_alike = sequence.last_token_ns, num_taken
                gap = now_ns - last_token_ns, num_taken
            gaps[gap] = gaps.get(gap, 0) + 1
        else:
            sequence.first_token_ns = now_ns
            lane.telemetry.first_token(sequence)
        sequence.last_token_ns = now_ns
        sink = sequence.sink
        if reason is not None:
            end_sequence(
                lane.admission, sequence, reason, token_ids=token_ids, origins=origins, text=text, logprobs=logprobs, stop_cause=stop_cause
            )  # fmt: skip
            continue
        if text is None and logprobs is None:
            sink.delta(sequence.choice, token_ids, origins)
        else:
            sink.choice(ChoiceDelta(sequence.choice, token_ids, origins, text, logprobs))
        if sink.num_backlog_tokens > max_backlog:
            sequence.is_paused = True
            sink.notify_below(max_backlog // 2 + 1, partial(lane.admission.resume, sequence.request))
    if result.features:
        note_features(round_, result.features)
    if round_.plan.choice is not None:
        round_.plan.choice.observe(round_, result, partial(lane.telemetry.priced, lane))
    lane.telemetry.committed(lane, round_, result, gaps)
    if is_short_of_blocks and round_.number >= lane.preempted_round:
        _preempt_newest(lane)


def _fail_row(lane: "Lane", slot: Slot, status: RowStatus, error: str) -> bool:
    """Handles a row that did not run; True if for want of blocks. Rows in flight after it are STALE too."""
    counters, sequence = lane.counters, slot.sequence
    if status is RowStatus.BAD:
        counters.num_bad_rows += 1
        lane.log.warning("bad row", "lane %d: request %s ends with an error: %s", lane.index, sequence.request.label, error)
        # What a request itself can bring about must not look like a fault.
        runs_dry = sequence.request.message.sampling.may_run_dry(lane.vocab_size, lane.eos_token_ids)
        kind = InvalidArgumentError if runs_dry else InternalError
        end_sequence(lane.admission, sequence, FinishReason.ERROR, error=kind(f"the verifier could not go on: {error}"))
    elif slot.is_closed:
        counters.num_dropped_rows += 1
    elif status is RowStatus.OUT_OF_BLOCKS:
        counters.num_rows_out_of_blocks += 1
        slot.has_failed = True
        return True
    else:
        counters.num_stale_rows += 1
        if not slot.has_failed:
            text = "lane %d: a row was %s without a reason; the sequence of request %s is opened anew"
            lane.log.warning("stale row", text, lane.index, status.name, sequence.request.label)
            lane.release(sequence)
            lane.admission.requeue(sequence, InternalError(f"the verifier answered {status.name} again and again"))
    return False


def _preempt_newest(lane: "Lane") -> None:
    """Closes the newest sequence of the least priority, to be resumed later, or before any other one whose client does not read; one that
    runs alone and finds no blocks is given up."""
    if not lane.running:
        return
    paused = [candidate for candidate in lane.running if candidate.is_paused]
    if paused:
        lane.preempted_round = lane.next_round
        lane.admission.park(max(paused, key=lambda candidate: candidate.order))
        return
    sequence = max(lane.running, key=lambda candidate: candidate.order)
    if len(lane.running) == 1:
        sequence.num_setbacks += 1
        if sequence.num_setbacks > MAX_SETBACKS:
            _give_up_blocks(lane, sequence)
        return
    lane.admission.preempt(sequence, "it is out of KV blocks")


def _give_up_blocks(lane: "Lane", sequence: Sequence) -> None:
    error = ResourceExhaustedError(
        f"the verifier has no KV blocks for {len(sequence.token_ids)} tokens, though nothing else runs there; "
        "raise its kv_cache_memory, or ask for fewer tokens"
    )
    end_sequence(lane.admission, sequence, FinishReason.ERROR, error=error)
