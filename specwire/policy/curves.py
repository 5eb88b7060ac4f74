"""Cost curves: measured tables that never fall, are never negative or NaN, and go on beyond what was measured (design section 4). numpy only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specwire.messages import DraftCost, VerifyCost
from specwire.policy.correction import Correction
from specwire.policy.shape import ShapeCorrection

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def dense_ms(sizes: Sequence[float], times: Sequence[float] | FloatArray, padded_up_to: int, length: int) -> FloatArray:
    """Milliseconds [length] at the sizes 0, 1, 2, ...; times are made monotone first, by their running maximum.

    Up to padded_up_to a size costs as much as the next measured one. Beyond, sizes are interpolated between the measured ones that are beyond,
    too; before the first of these they cost what it costs. Past the last measured size the last segment goes on; a single one grows in
    proportion.

    Args:
        sizes: measured, rising, at least one, above 0.
        times: their milliseconds.
    """
    known, ms = np.asarray(sizes, dtype=np.float64), np.maximum.accumulate(np.asarray(times, dtype=np.float64))
    index = np.arange(length, dtype=np.float64)
    dense = ms[np.minimum(np.searchsorted(known, index), len(known) - 1)]
    beyond = known > padded_up_to
    if beyond.any():
        dense[padded_up_to + 1 :] = np.interp(index[padded_up_to + 1 :], known[beyond], ms[beyond])
    slope = (ms[-1] - ms[-2]) / (known[-1] - known[-2]) if len(known) > 1 else ms[-1] / known[-1]
    past = index > known[-1]
    dense[past] = ms[-1] + slope * (index[past] - known[-1])
    return dense


class VerifyCurve:
    """Milliseconds of a round at a verifier: (step[tokens] + ms_per_row x (rows - 1) + ms_per_kv_token x KV tokens) x factor[tokens].

    Args:
        cost: the verifier's table; points that are no positive finite numbers are left out.

    Attributes:
        correction: the factors; chunk_correction: of rounds with long chunks, where these have a table of their own: what that is wrong by says
            nothing of drafts.
    """

    def __init__(self, cost: VerifyCost) -> None:
        self.correction, self.chunk_correction = ShapeCorrection(), ShapeCorrection()
        self._steps = _DenseTable(cost.num_tokens, cost.step_ms, cost.max_graph_tokens)
        self._chunks = _DenseTable(cost.chunk_num_tokens, cost.chunk_ms, 0)
        self._max_graph_row_tokens = cost.max_graph_row_tokens
        self._ms_per_row, self._ms_per_kv_token = _slope(cost.ms_per_row), _slope(cost.ms_per_kv_token)
        self.is_known = self._steps.num_points > 1
        """Whether the table says how costs grow: it has two sizes or more."""

    def table_ms(self, num_tokens: IntArray, num_rows: int, num_kv_tokens: int, longest_row: int = 1) -> FloatArray:
        """Without the factor.

        Args:
            num_tokens: [n] of the round, drafts included; one result each.
            num_rows: of the round.
            num_kv_tokens: tokens before its rows' own ones, which attention reads.
            longest_row: tokens of its longest row: of a prefill chunk, where it has one.
        """
        return self._table(longest_row).at(num_tokens) + self._rest_ms(num_rows, num_kv_tokens)

    def ms(self, num_tokens: IntArray, num_rows: int, num_kv_tokens: int, longest_row: int = 1) -> FloatArray:
        """See `table_ms`; with the factors."""
        if not len(num_tokens):
            return np.zeros(0)
        factors = self.correction_of(longest_row).up_to(int(num_tokens.max()))[num_tokens]
        return self.table_ms(num_tokens, num_rows, num_kv_tokens, longest_row) * factors

    def ms_from(self, num_tokens: int, num_more: int, num_rows: int, num_kv_tokens: int, longest_row: int = 1) -> FloatArray:
        """The same as `ms` of num_tokens, num_tokens + 1, ..., num_tokens + num_more, sooner."""
        ms = self._table(longest_row).between(num_tokens, num_tokens + num_more) + self._rest_ms(num_rows, num_kv_tokens)
        ms *= self.correction_of(longest_row).up_to(num_tokens + num_more)[num_tokens : num_tokens + num_more + 1]
        return ms

    def table_ms_of(self, num_tokens: int, num_rows: int, num_kv_tokens: int, longest_row: int = 1) -> float:
        """The same as `table_ms` of one number."""
        return float(self._table(longest_row).between(num_tokens, num_tokens)[0]) + self._rest_ms(num_rows, num_kv_tokens)

    def correction_of(self, longest_row: int) -> ShapeCorrection:
        """The factors of rounds with such a row."""
        return self.chunk_correction if self._is_chunk(longest_row) else self.correction

    def _table(self, longest_row: int) -> "_DenseTable":
        return self._chunks if self._is_chunk(longest_row) else self._steps

    def _is_chunk(self, longest_row: int) -> bool:
        return self._chunks.num_points > 0 and 0 < self._max_graph_row_tokens < longest_row

    def _rest_ms(self, num_rows: int, num_kv_tokens: int) -> float:
        return self._ms_per_row * max(0, num_rows - 1) + self._ms_per_kv_token * max(0, num_kv_tokens)


class DraftCurve:
    """Milliseconds of a draft call: (draft[K][sequences] + ms_per_kv_token x K x KV tokens) x factor; 0 at K = 0 or without sequences.

    Between measured K and numbers of sequences it is interpolated, beyond them their last segment goes on.

    Args:
        costs: the drafter's table; entries that are no positive finite numbers are left out.
        ms_per_kv_token: what each token of context adds to each draft position.
    """

    def __init__(self, costs: Sequence[DraftCost], ms_per_kv_token: float = 0.0) -> None:
        self.correction = Correction()
        self._by_sequences: dict[int, dict[int, float]] = {}
        for k, num_sequences, ms in sorted(costs, key=lambda cost: (cost.num_sequences, cost.num_draft_tokens)):
            if k > 0 < num_sequences and 0.0 < ms < math.inf:
                self._by_sequences.setdefault(num_sequences, {})[k] = ms
        self._ms_per_kv_token = _slope(ms_per_kv_token)
        self.reads_kv = self._ms_per_kv_token > 0
        self.is_known = bool(self._by_sequences)
        self._table: FloatArray = np.zeros((0, 0))  # [K, sequences]
        self._rises: FloatArray = np.zeros((0, 0))  # [K, sequences]: from K to K + 1
        self._rows_of_rises: list[list[float]] = []

    def table_ms(self, num_draft_tokens: int, num_sequences: int, num_kv_tokens: int = 0) -> float:
        """Without the factor; num_kv_tokens: tokens of all these sequences."""
        if num_draft_tokens <= 0 or num_sequences <= 0:
            return 0.0
        self._reach(num_draft_tokens, num_sequences)
        return float(self._table[num_draft_tokens, num_sequences]) + self._ms_per_kv_token * num_draft_tokens * max(0, num_kv_tokens)

    def ms(self, num_draft_tokens: int, num_sequences: int, num_kv_tokens: int = 0) -> float:
        """See `table_ms`; with the factor."""
        return self.table_ms(num_draft_tokens, num_sequences, num_kv_tokens) * self.correction.factor

    def ms_of_asks(self, num_asked: IntArray, kv_tokens_per_sequence: float = 0.0) -> FloatArray:
        """Milliseconds [n], with the factor, of calls in which num_asked[n, j] sequences are asked for more than j drafts: a sum over the positions
        of what one more draft of so many sequences adds. Where all are asked for equally many, the same as `ms`."""
        if not num_asked.size:
            return np.zeros(len(num_asked))
        self._reach(num_asked.shape[1], int(num_asked.max()))
        rises = self._rises[np.arange(num_asked.shape[1]), num_asked].sum(axis=1)
        return (rises + self._ms_per_kv_token * kv_tokens_per_sequence * num_asked.sum(axis=1)) * self.correction.factor

    def ms_of_ask(self, num_asked: Sequence[int], kv_tokens_per_sequence: float = 0.0) -> float:
        """The same of one call."""
        self._reach(len(num_asked), max(num_asked, default=0))
        rises = sum([rise[number] for rise, number in zip(self._rows_of_rises, num_asked, strict=False)])
        return (rises + self._ms_per_kv_token * kv_tokens_per_sequence * sum(num_asked)) * self.correction.factor

    def _reach(self, num_draft_tokens: int, num_sequences: int) -> None:
        """Makes the table large enough."""
        assert self.is_known, "a drafter without a cost table: see is_known"
        if num_draft_tokens >= self._table.shape[0] or num_sequences >= self._table.shape[1]:
            self._table = self._dense(num_draft_tokens, num_sequences)
            rises = np.diff(self._table, axis=0, prepend=0.0)[1:]
            rises[0] = self._table[1]
            rises[:, 0] = 0.0
            self._rises, self._rows_of_rises = rises, rises.tolist()

    def _dense(self, num_draft_tokens: int, num_sequences: int) -> FloatArray:
        """[K + 1, sequences + 1] at least up to what is asked for and what was measured."""
        counts = list(self._by_sequences)
        num_k = 1 + max(num_draft_tokens, *(max(by_k) for by_k in self._by_sequences.values()))
        length = 1 + max(2 * num_sequences, counts[-1])
        measured = np.stack([dense_ms(list(by_k), list(by_k.values()), 0, num_k) for by_k in self._by_sequences.values()])  # [n, K + 1]
        table = np.stack([dense_ms(counts, measured[:, k], 0, length) for k in range(num_k)])
        return np.maximum.accumulate(table, axis=0)


@dataclass(frozen=True, slots=True)
class HopPrior:
    """Milliseconds between the peers before any was measured, of gRPC between processes of one machine.

    Args:
        hop_ms: a message there and its answer back, without the peer's work.
        host_ms, host_ms_per_row: the coordinator's own work of a step.
    """

    hop_ms: float = 0.25
    host_ms: float = 0.3
    host_ms_per_row: float = 0.007


class HopCurve:
    """Milliseconds of a step in which neither verifier nor drafter works: (host + host_per_row x rows + hop x number of hops) x factor.

    Attributes:
        correction: of steps with drafts; ahead_correction: of those that run ahead, in which there is less to do.
    """

    def __init__(self, prior: HopPrior = HopPrior()) -> None:
        self.correction, self.ahead_correction = Correction(), Correction()
        self._prior = prior

    def table_ms(self, num_rows: int, num_hops: int) -> float:
        """Without the factor; num_hops: 1 to the verifier, 2 with the drafter."""
        return self._prior.host_ms + self._prior.host_ms_per_row * num_rows + self._prior.hop_ms * num_hops

    def ms(self, num_rows: int, num_hops: int) -> float:
        """See `table_ms`; with the factor."""
        return self.table_ms(num_rows, num_hops) * self.correction_of(num_hops).factor

    def correction_of(self, num_hops: int) -> Correction:
        """The factor of such steps."""
        return self.ahead_correction if num_hops == 1 else self.correction


class _DenseTable:
    """A curve by number of tokens, computed as far as it was asked for."""

    def __init__(self, sizes: Sequence[int], times: Sequence[float], padded_up_to: int) -> None:
        points = sorted({size: ms for size, ms in zip(sizes, times, strict=True) if size > 0 and 0.0 < ms < math.inf}.items())
        self.num_points = len(points)
        self._sizes, self._times = [size for size, _ in points], [ms for _, ms in points]
        self._padded_up_to = max(0, padded_up_to)
        self._dense: FloatArray = np.zeros(0)

    def at(self, num_tokens: IntArray) -> FloatArray:
        """[n] -> [n]"""
        self._reach(int(num_tokens.max()) if len(num_tokens) else 0)
        return self._dense[num_tokens]

    def between(self, first: int, last: int) -> FloatArray:
        """At these sizes and all between them; not to be written."""
        self._reach(last)
        return self._dense[first : last + 1]

    def _reach(self, largest: int) -> None:
        assert self.num_points, "a table without sizes: see is_known"
        if largest >= len(self._dense):
            self._dense = dense_ms(self._sizes, self._times, self._padded_up_to, 1 + max(2 * largest, self._sizes[-1]))


def _slope(value: float) -> float:
    return value if 0.0 < value < math.inf else 0.0
