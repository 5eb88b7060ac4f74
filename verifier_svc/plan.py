"""What a row of a round asks for, checked against the slot's state: the tokens to compute and whether the row samples."""

from collections.abc import Sequence
from typing import NamedTuple

from specwire.errors import InvalidArgumentError
from specwire.messages import VerifyRow
from specwire.proposals import RowProposals, what_is_wrong
from specwire.token_ids import check_token_ids

from .slots import Slot, VerifierLimits

UNREAD = (0,)
"""Stands for a token that is not read yet."""
_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""


class Segment(NamedTuple):
    """Tokens of one slot to compute: known ones from start_position on, then drafts."""

    slot: Slot
    start_position: int
    num_known: int
    draft_tokens: list[int]
    samples: bool  # whether it reaches the end of the known tokens, and so emits
    from_device: bool = False  # the first token is the slot's last one, which is not read yet
    proposals: RowProposals | None = None  # what the drafts were drawn from

    @property
    def token_ids(self) -> Sequence[int]:
        """What goes through the model."""
        if self.from_device:
            return UNREAD
        return self.slot.token_ids[self.start_position : self.start_position + self.num_known] + self.draft_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_known + len(self.draft_tokens)

    @property
    def end_position(self) -> int:
        """Behind the last token."""
        return self.start_position + self.num_known + len(self.draft_tokens)


def depends_on_unread(slot: Slot, row: VerifyRow) -> bool:
    """Whether a row can be planned only once the slot's unread rows are read."""
    if not slot.num_unread_rows:
        return False
    if slot.last_num_drafts:
        return True
    if row.token_budget or not slot.num_unread_tokens:
        return False
    return not row.from_round or slot.keeps_history


def plan_common_row(slot: Slot, row: VerifyRow, limits: VerifierLimits) -> Segment | None:
    """The segment of a decode row of a slot without anything special, in a fraction of the time: most rows of most rounds are such. None: whatever
    the row asks for, `plan_row` has to look. Otherwise the row is fresh, depends on no unread round, and `plan_row` would say the same."""
    _, epoch, parent_round, token_budget, base_len, first_token, from_round, drafts = row
    token_ids, num_unread = slot.token_ids, slot.num_unread_tokens
    if (
        token_budget
        or parent_round != slot.last_round
        or epoch != slot.epoch
        or base_len != len(token_ids) + num_unread
        or base_len != slot.num_launched_tokens + 1
        or base_len + len(drafts) >= limits.max_model_len
        or slot.error
    ):
        return None
    if from_round:
        if (
            from_round != parent_round or first_token != -1 or drafts or slot.last_num_drafts
            or base_len <= slot.num_opened_tokens or not slot.runs_ahead or (slot.keeps_history and slot.num_unread_rows)
        ):  # fmt: skip
            return None
    else:
        if slot.num_unread_rows or first_token != token_ids[-1]:
            return None
        if drafts and not (len(drafts) <= limits.max_num_draft_tokens and min(drafts) >= 0 and max(drafts) < limits.vocab_size):
            return None
    return _new(Segment, (slot, base_len - 1, 1, drafts, True, num_unread > 0, None))


def plan_row(slot: Slot, row: VerifyRow, limits: VerifierLimits, proposals: RowProposals | None = None) -> Segment | None:
    """The segment of a fresh row of a live slot; None for a queued prefill chunk that finds nothing left.

    Args:
        slot: without unread drafts; without unread tokens, too, if the row names its first token.
        proposals: what the row's drafts were drawn from; None = nothing else could have been drafted.

    Raises:
        InvalidArgumentError: the row is BAD.
    """
    if row.token_budget:
        _check_prefill(row)
        num_tokens = min(row.token_budget, slot.num_opened_tokens - slot.num_launched_tokens)
        if num_tokens <= 0:
            return None
        samples = slot.num_launched_tokens + num_tokens == slot.num_opened_tokens
        return Segment(slot, slot.num_launched_tokens, num_tokens, [], samples)
    _check_decode(slot, row, limits)
    if proposals is not None and (wrong := what_is_wrong(row.draft_tokens, proposals, limits.vocab_size)):
        raise InvalidArgumentError(f"of the row's drafts {wrong}; send what they were drawn from")
    return Segment(slot, row.base_len - 1, 1, row.draft_tokens, True, slot.num_unread_tokens > 0, proposals)


def _check_prefill(row: VerifyRow) -> None:
    if row.token_budget < 0:
        raise InvalidArgumentError(f"token_budget is {row.token_budget}; it must be positive in a prefill row, 0 in a decode row")
    if row.base_len != 0 or row.first_token != -1 or row.from_round != 0 or row.draft_tokens:
        raise InvalidArgumentError(
            f"a prefill row (token_budget {row.token_budget}) has base_len {row.base_len}, first_token {row.first_token}, from_round "
            f"{row.from_round} and {len(row.draft_tokens)} drafts; it must have 0, -1, 0 and none"
        )


def _check_decode(slot: Slot, row: VerifyRow, limits: VerifierLimits) -> None:
    num_tokens, num_drafts = slot.num_tokens, len(row.draft_tokens)
    if row.base_len != num_tokens:
        raise InvalidArgumentError(f"base_len is {row.base_len}, but the verifier's sequence has {num_tokens} tokens; reopen it in a new epoch")
    if slot.num_launched_tokens != num_tokens - 1:
        raise InvalidArgumentError(
            f"a decode row at token {num_tokens - 1} needs all tokens before it, but only {slot.num_launched_tokens} are computed; "
            "send prefill rows first"
        )
    if row.from_round:
        _check_run_ahead(slot, row)
    elif row.first_token != slot.token_ids[-1]:
        raise InvalidArgumentError(f"first_token is not the verifier's token {num_tokens - 1}; reopen the sequence in a new epoch")
    if num_drafts > limits.max_num_draft_tokens:
        raise InvalidArgumentError(
            f"the row has {num_drafts} drafts, but num_speculative_tokens is {limits.max_num_draft_tokens}; send fewer, or raise it at the verifier"
        )
    if num_tokens + num_drafts + 1 > limits.max_model_len:
        raise InvalidArgumentError(
            f"{num_tokens} tokens, {num_drafts} drafts and the next token pass max_model_len = {limits.max_model_len}; send fewer drafts or stop"
        )
    check_token_ids(row.draft_tokens, limits.vocab_size, "draft_tokens")


def _check_run_ahead(slot: Slot, row: VerifyRow) -> None:
    """FROM_ROUND rows run where a pipelined device could run them too, whether or not this one is."""
    if row.from_round != slot.last_round:
        raise InvalidArgumentError(f"from_round is {row.from_round}, but the slot's last row ran in round {slot.last_round}; name that one")
    if row.draft_tokens or row.first_token != -1:
        raise InvalidArgumentError(
            f"a row from round {row.from_round} has {len(row.draft_tokens)} drafts and first_token {row.first_token}; it must have none and -1"
        )
    if slot.last_num_drafts:
        raise InvalidArgumentError(f"round {row.from_round} carried {slot.last_num_drafts} drafts of this slot; wait for its answer instead")
    if not slot.is_prefilled:
        raise InvalidArgumentError(f"round {row.from_round} sampled no token of this slot; send prefill rows that reach its last token first")
    if not slot.runs_ahead:
        raise InvalidArgumentError("bad words of several tokens need the sequence's last token on the host; send first_token instead of from_round")
