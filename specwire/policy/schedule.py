"""Dynamic K: how many drafts a step may verify, by its batch size (docs/design.md section 4)."""

import itertools
from collections.abc import Sequence

from specwire.errors import InvalidArgumentError

Schedule = Sequence[Sequence[int]]
_NAME = "num_speculative_tokens_per_batch_size"


def validate_schedule(schedule: Schedule) -> list[tuple[int, int, int]]:
    """The entries (start, end, K) sorted by start; both ends belong to the range.

    Raises:
        InvalidArgumentError: not a non-empty list of integer triples, start < 1, start > end, K < 0, ranges that overlap, or a first
            range that does not start at 1.
    """
    if not isinstance(schedule, (list, tuple)) or not schedule:
        raise InvalidArgumentError(f"{_NAME} is {schedule!r}, but must be a non-empty list of [start, end, K], for example [[1, 16, 5], [17, 64, 2]]")
    entries = []
    for entry in schedule:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise InvalidArgumentError(f"{_NAME} holds {entry!r}, but every entry must be 3 integers [start, end, K]")
        if any(isinstance(value, bool) or not isinstance(value, int) for value in entry):
            raise InvalidArgumentError(f"{_NAME} holds {entry!r}, but start, end and K must be integers; write them without quotes or decimals")
        start, end, num_tokens = entry
        if start < 1:
            raise InvalidArgumentError(f"{_NAME} holds {entry!r}, whose start is {start}, but batch sizes start at 1; raise it")
        if start > end:
            raise InvalidArgumentError(f"{_NAME} holds {entry!r}, whose start {start} is past its end {end}; swap or correct them")
        if num_tokens < 0:
            raise InvalidArgumentError(f"{_NAME} holds {entry!r}, whose K is {num_tokens}, but K must be 0 or more; 0 drafts nothing")
        entries.append((start, end, num_tokens))
    entries.sort()
    if entries[0][0] != 1:
        raise InvalidArgumentError(
            f"{_NAME} starts at batch size {entries[0][0]}, but the first range must start at 1; add a range for smaller batches"
        )
    for (start, end, _), (next_start, next_end, _) in itertools.pairwise(entries):
        if next_start <= end:
            raise InvalidArgumentError(f"{_NAME} has the ranges {start}-{end} and {next_start}-{next_end}, which overlap; make them disjoint")
    return entries


def dense_schedule(schedule: Schedule | None, num_speculative_tokens: int, max_num_seqs: int) -> list[int]:
    """K by batch size: a list of max_num_seqs + 1 numbers; index 0 is 0 and never used.

    K is clipped to num_speculative_tokens; a gap takes the K of the range before it; the last K extends to max_num_seqs. Without a
    schedule every batch size has num_speculative_tokens.

    Raises:
        InvalidArgumentError: a schedule that validate_schedule refuses, max_num_seqs < 1 or num_speculative_tokens < 0 (0 = no drafting).
    """
    if max_num_seqs < 1:
        raise InvalidArgumentError(f"max_num_seqs is {max_num_seqs}, but must be 1 or more")
    if num_speculative_tokens < 0:
        raise InvalidArgumentError(f"num_speculative_tokens is {num_speculative_tokens}, but must be 0 or more; 0 drafts nothing")
    if schedule is None:
        return [0] + [num_speculative_tokens] * max_num_seqs
    table = [0] * (max_num_seqs + 1)
    for start, _, num_tokens in validate_schedule(schedule):
        for batch_size in range(start, max_num_seqs + 1):
            table[batch_size] = min(num_tokens, num_speculative_tokens)
    return table


class SteadySchedule:
    """A lane's K from step to step: the table's, but a change waits until the table has said otherwise for some steps in a row.

    So a batch whose size goes up and down around the border of two ranges keeps its K, instead of changing between drafting and running ahead.

    Args:
        table: K by batch size, as `dense_schedule` gives it.
        num_steps: steps in a row after which K changes; 0 = with the first one.
    """

    def __init__(self, table: Sequence[int], num_steps: int = 0) -> None:
        self._table = table
        self._num_steps = num_steps
        self._current = -1
        self._num_others = 0
        self._step = -1

    def choose(self, batch_size: int, step: int) -> int:
        """K of a step, which samples for so many sequences: 1 or more. Its number says whether it is a further one: plans may come to nothing."""
        wanted = self._table[batch_size]
        if wanted == self._current:
            self._num_others = 0
            return wanted
        if step != self._step:
            self._step = step
            self._num_others += 1
        if self._current < 0 or self._num_others > self._num_steps:
            self._current, self._num_others = wanted, 0
        return self._current


def schedule_ranges(table: Sequence[int]) -> list[tuple[int, int, int]]:
    """A dense table as the fewest ranges (start, end, K), for people to read."""
    ranges: list[tuple[int, int, int]] = []
    for batch_size, num_tokens in enumerate(table[1:], start=1):
        if ranges and ranges[-1][2] == num_tokens:
            ranges[-1] = (ranges[-1][0], batch_size, num_tokens)
        else:
            ranges.append((batch_size, batch_size, num_tokens))
    return ranges


def describe_clipping(schedule: Schedule | None, num_speculative_tokens: int, max_num_seqs: int) -> list[str]:
    """One sentence for each way in which an entry does not take effect as written."""
    reasons = []
    for start, end, num_tokens in validate_schedule(schedule) if schedule is not None else []:
        if start > max_num_seqs:
            reasons.append(f"[{start}, {end}, {num_tokens}]: unused, since max_num_seqs is {max_num_seqs}")
            continue
        if num_tokens > num_speculative_tokens:
            reasons.append(f"[{start}, {end}, {num_tokens}]: K clipped to num_speculative_tokens = {num_speculative_tokens}")
        if end > max_num_seqs:
            reasons.append(f"[{start}, {end}, {num_tokens}]: end cut to max_num_seqs = {max_num_seqs}")
    return reasons


def describe_gaps(schedule: Schedule | None, max_num_seqs: int) -> list[str]:
    """One sentence for each range of batch sizes that no entry names."""
    entries = validate_schedule(schedule) if schedule is not None else []
    starts = [start for start, _, _ in entries]
    reasons = []
    for (start, end, num_tokens), next_start in zip(entries, [*starts[1:], max_num_seqs + 1][: len(entries)], strict=True):
        last = min(next_start - 1, max_num_seqs)
        if end < last:
            sizes = f"{end + 1}" if end + 1 == last else f"{end + 1} to {last}"
            reasons.append(f"{sizes} sequences: in no entry, so that K of [{start}, {end}, {num_tokens}] goes on")
    return reasons
