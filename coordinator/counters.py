"""What went other than planned: plain counts."""

from collections import Counter
from dataclasses import dataclass, field

from specwire.speculative_config import MAX_NUM_TOKENS


@dataclass(slots=True)
class Counters:
    """Counts since the start of the coordinator."""

    num_rounds: int = 0
    num_rows: int = 0
    num_unbounded_rounds: int = 0  # with prefill chunks beside decodes, though no cost table says how long they take
    num_stale_rows: int = 0
    num_bad_rows: int = 0
    num_rows_out_of_blocks: int = 0
    num_dropped_rows: int = 0  # answers of sequences that had ended or were opened anew
    num_preemptions: int = 0
    num_pauses: int = 0  # sequences that gave their place to others because their clients do not read
    num_verifier_losses: int = 0
    num_verifier_timeouts: int = 0  # those of the losses that did not answer a round any more, though the connection held
    num_verifier_refusals: int = 0  # a verifier that does not match or that somebody else holds
    num_handovers: int = 0  # sequences that left a verifier which was about to stop
    num_drafter_losses: int = 0
    num_drafter_refusals: int = 0  # a drafter that does not match
    num_drafter_timeouts: int = 0
    num_drafter_handovers: int = 0  # sequences that left a drafter which was about to stop
    num_moves: int = 0  # sequences that went to another lane so that all have their share
    num_drafter_moves: int = 0  # the same between drafters
    num_lookup_failures: int = 0  # look-ups of host names that failed
    num_stale_drafts: int = 0  # rows of draft replies for another epoch, base_len or closed slot
    num_garbage_drafts: int = 0  # rows of draft replies that no drafter should send
    num_nan_scores: int = 0  # scores of drafts that are no numbers; the drafts are used all the same
    num_bad_traceparents: int = 0  # of clients: they name no span
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Sequences and steps that went without drafts though K was above 0, by cause."""
    outcomes: list[list[int]] = field(default_factory=lambda: [[0] * (num_drafts + 1) for num_drafts in range(MAX_NUM_TOKENS + 1)])
    """Verified rows with drafts: outcomes[number of draft tokens][number of accepted ones]. Lists, since every row of a step counts here."""

    @property
    def num_drafts(self) -> int:
        """Verified rows with at least one draft token."""
        return sum(map(sum, self.outcomes))

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of those rows."""
        return sum(num_drafts * sum(counts) for num_drafts, counts in enumerate(self.outcomes))

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return sum(num_accepted * count for counts in self.outcomes for num_accepted, count in enumerate(counts))
