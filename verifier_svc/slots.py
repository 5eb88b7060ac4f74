"""The sequences that a verifier holds, one a slot, and what it takes to open one."""

from dataclasses import dataclass, field

import torch

from specwire.engine.sampling.slot import SlotSampling
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.messages import VerifyOpen
from specwire.sampling_params import check_choice
from specwire.speculative_acceptance import check_rates
from specwire.token_ids import check_token_ids


@dataclass(frozen=True, slots=True)
class VerifierLimits:
    """What one verifier takes.

    Args:
        vocab_size: columns of the logits; token ids are below it.
        max_model_len: most tokens of a sequence, output included.
        max_num_seqs: most open slots.
        max_num_draft_tokens: most drafts of a row (K_max).
        max_num_batched_tokens: most tokens of a round: prefill budgets, first tokens and drafts.
        synthetic_rates: None = strict acceptance; else the unconditional rates of sequences that bring none.
        tests_ratio: sampled sequences' drafts are accepted by the ratio test.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_draft_tokens: int
    max_num_batched_tokens: int
    synthetic_rates: tuple[float, ...] | None = None
    tests_ratio: bool = False


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence. Its KV is computed up to `num_computed_tokens`; a sampled token's KV is computed by the row that follows it.

    A launched round moves `last_*`, `num_launched_tokens` and `num_unread_*` on; everything else is as of the last round that was read.
    """

    slot: int
    epoch: int
    token_ids: list[int]  # all that are read: prompt, committed output, and what was sampled here
    num_opened_tokens: int  # how many of them Open brought: prefill ends there
    sampling: SlotSampling | None  # None iff Open itself was bad
    num_computed_tokens: int = 0  # final ones, without rejected drafts
    num_cached_tokens: int = 0
    num_launched_tokens: int = 0  # final ones once all launched rounds are read, but for drafts that these accept
    num_reserved_tokens: int = 0  # what its blocks hold at least
    num_unread_rows: int = 0  # rows of launched rounds that are not read
    num_unread_tokens: int = 0  # next tokens that these sample
    last_round: int = 0  # the last round whose row of this slot ran
    last_num_drafts: int = 0  # drafts of that row
    runs_ahead: bool = True  # whether a row may start from a token that the host does not know
    keeps_history: bool = False  # whether its sampling state must see the tokens that are read
    looked_up_round: int = 0  # the round before whose rows the prefix cache was last asked for its tokens
    is_closed: bool = False
    cached_blocks: list[tuple[int, bytes]] = field(default_factory=list)  # what the prefix cache had of it when it was closed with rows unread
    error: str = ""  # why the slot is dead; empty while it lives
    error_round: int = 0  # the round that found it; rows of later rounds are answered with it

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence once all launched rounds are read, but for drafts that these accept."""
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def is_prefilled(self) -> bool:
        """Whether launched rounds compute everything that Open brought, so that the last token is one sampled here."""
        return self.num_launched_tokens >= self.num_opened_tokens

    def launch(self, round_number: int, num_known: int, num_drafts: int, *, samples: bool) -> None:
        """A row of these tokens is launched."""
        self.num_launched_tokens += num_known
        self.num_unread_rows += 1
        self.num_unread_tokens += samples
        self.last_round, self.last_num_drafts = round_number, num_drafts

    def is_dead_in(self, round_number: int) -> bool:
        """Whether an earlier round has found out that the slot is dead."""
        return bool(self.error) and self.error_round < round_number

    def kill(self, error: str, round_number: int) -> None:
        """The slot is dead from this round on. Rounds are planned before those ahead of them are read: the earliest one's error counts."""
        if not self.error or round_number < self.error_round:
            self.error, self.error_round = error, round_number


def open_slot(message: VerifyOpen, limits: VerifierLimits, device: torch.device, like: SlotSampling | None) -> Slot:
    """A new slot, perhaps of the same request as an earlier one. A request that can't be served gives a dead one, whose error says why: its rows are
    answered BAD."""
    try:
        _check_open(message, limits)
        sampling = SlotSampling(
            message.sampling,
            key=message.noise_key,
            choice=message.choice,
            vocab_size=limits.vocab_size,
            token_ids=message.token_ids,
            num_prompt_tokens=message.num_prompt_tokens,
            eos_token_ids=message.eos_token_ids,
            synthetic_rates=_synthetic_rates(message.synthetic_acceptance_rates, limits),
            tests_ratio=limits.tests_ratio,
            device=device,
            like=like,
        )
    except (InvalidArgumentError, UnsupportedError) as error:
        return Slot(message.slot, message.epoch, [], 0, None, error=str(error))
    return Slot(message.slot, message.epoch, list(message.token_ids), len(message.token_ids), sampling, runs_ahead=message.sampling.runs_ahead)


def _check_open(message: VerifyOpen, limits: VerifierLimits) -> None:
    num_tokens, num_prompt = len(message.token_ids), message.num_prompt_tokens
    if not 1 <= num_prompt <= num_tokens:
        raise InvalidArgumentError(f"num_prompt_tokens is {num_prompt} with {num_tokens} token ids; it must be from 1 to their number")
    if num_tokens >= limits.max_model_len:
        raise InvalidArgumentError(
            f"the sequence has {num_tokens} tokens, but max_model_len is {limits.max_model_len}, the output included; "
            "shorten the prompt or serve with a larger max_model_len"
        )
    check_token_ids(message.token_ids, limits.vocab_size, "token_ids")
    check_token_ids(message.eos_token_ids, limits.vocab_size, "eos_token_ids")
    check_choice(message.choice)
    if message.variant:
        raise UnsupportedError(f"variant {message.variant!r} is not served; this verifier has only the base model: leave variant empty")


def _synthetic_rates(rates: tuple[float, ...], limits: VerifierLimits) -> tuple[float, ...] | None:
    if limits.synthetic_rates is None:
        if rates:
            raise InvalidArgumentError(
                "synthetic_acceptance_rates were sent, but this verifier's rejection_sample_method is "
                f"{'probabilistic' if limits.tests_ratio else 'strict'}; "
                "remove them, or start it with rejection_sample_method synthetic"
            )
        return None
    if not rates:
        return limits.synthetic_rates
    check_rates(rates, limits.max_num_draft_tokens)
    return rates
