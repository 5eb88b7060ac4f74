"""Which prefills a step carries, and how much of them beside sequences that decode."""

import logging

from specwire.messages import VerifyCost, VerifyResult
from specwire.policy.correction import Correction
from specwire.policy.cost import verify_ms

from .sequence import Sequence
from .slots import Round, Slot

logger = logging.getLogger(__name__)

_ROUNDS_PER_LOOK = 4
"""Of the rounds without chunks one in so many is compared with the table: every step has such a one."""
_OLDEST_SHARE = 4
"""The oldest prefill gets one part in so many of a step's chunk tokens, however many shorter ones there are."""


class ChunkLimit:
    """Bounds how long prefill chunks hold up the sequences that decode beside them, by what the verifier said that rounds cost and what they took
    lately.

    A round that decodes takes at most max(max_decode_gap_ms, twice what it would take without chunks): where decoding alone takes more than half
    of the gap, prefills get half of the verifier's time, so that they go on too.

    Args:
        max_decode_gap_ms: 0 = no bound.
        cost: the verifier's table; without one nothing can be bounded.
        least: tokens that a step's chunks may always have; a KV block.
        label: what the log calls the verifier.

    Attributes:
        is_blind: there should be a bound, but the verifier has no table.
        chunk_correction, decode_correction: of the table, for rounds with and without chunks.
    """

    def __init__(self, max_decode_gap_ms: float, cost: VerifyCost, least: int, label: str) -> None:
        self.chunk_correction = Correction()
        self.decode_correction = Correction()
        self.is_blind = max_decode_gap_ms > 0 and not cost.num_tokens
        if self.is_blind:
            logger.warning("%s has no cost table: prefills hold up what decodes by whole rounds, and max_decode_gap_ms bounds nothing", label)
        self._gap_ms = max_decode_gap_ms if cost.num_tokens else 0.0
        self._cost = cost
        self._least = least

    def num_tokens(self, budget: int, decodes: list[Sequence], num_draft_tokens: int) -> int:
        """The most tokens of chunks, up to `budget`, beside decode rows with so many drafts in all."""
        if not self._gap_ms or budget <= self._least:
            return budget
        num_rows, num_tokens = len(decodes) + 1, len(decodes) + num_draft_tokens
        num_kv_tokens = sum([len(sequence.token_ids) for sequence in decodes]) if self._cost.ms_per_kv_token else 0
        limit_ms = self._gap_ms
        if num_tokens:
            limit_ms = max(limit_ms, 2 * self.decode_correction.factor * verify_ms(self._cost, num_tokens, len(decodes), num_kv_tokens))
        limit_ms /= self.chunk_correction.factor
        fits, too_many = self._least, budget + 1
        while too_many - fits > 1:
            tried = (fits + too_many) // 2
            if verify_ms(self._cost, num_tokens + tried, num_rows, num_kv_tokens, longest_row=tried) <= limit_ms:
                fits = tried
            else:
                too_many = tried
        return fits

    def answered(self, round_: Round, result: VerifyResult) -> None:
        """A round has been computed."""
        timing, has_chunks = result.timing, bool(round_.plan.chunks)
        if not self._gap_ms or not result.num_padded_tokens or not timing.received_ns or not (has_chunks or round_.number % _ROUNDS_PER_LOOK == 0):
            return
        rows = round_.rows
        num_kv_tokens = sum([row.base_len for row in rows]) if self._cost.ms_per_kv_token else 0
        longest_row = min(max([row.token_budget for row in rows]), result.num_padded_tokens) if has_chunks else 1
        table_ms = verify_ms(self._cost, result.num_padded_tokens, len(rows), num_kv_tokens, max(1, longest_row))
        correction = self.chunk_correction if has_chunks else self.decode_correction
        correction.observe(table_ms, (timing.finished_ns - timing.started_ns) / 1e6)


def share_chunks(prefills: list[Slot], budget: int) -> list[tuple[Slot, int]]:
    """Divides a step's chunk tokens: by importance, then the one with the fewest tokens left first, which gives the shortest mean time to the
    first token. The oldest of the most important ones has a quarter for itself, so that it comes to its end whatever else arrives.

    Args:
        prefills: slots with tokens left.
        budget: tokens for all of them.
    """
    if budget <= 0 or not prefills:
        return []
    num_left = [slot.num_remaining_tokens for slot in prefills]
    if sum(num_left) <= budget:
        return list(zip(prefills, num_left, strict=True))
    oldest = min(prefills, key=lambda slot: slot.sequence.order)
    reserved = min(oldest.num_remaining_tokens, -(-budget // _OLDEST_SHARE))
    budget -= reserved
    chunks = []
    for slot in sorted(prefills, key=lambda slot: (slot.sequence.order[0], slot.num_remaining_tokens, slot.sequence.order)):
        num_reserved = reserved if slot is oldest else 0
        num_tokens = min(slot.num_remaining_tokens - num_reserved, budget)
        budget -= num_tokens
        if num_tokens + num_reserved:
            chunks.append((slot, num_tokens + num_reserved))
    return chunks
