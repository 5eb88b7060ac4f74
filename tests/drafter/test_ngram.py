"""Prompt lookup: hand-made cases, a brute-force twin, and its time at the size that counts."""

import itertools
import logging
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.method import Ask
from drafter_svc.ngram import Ngram, longest_suffix_match
from specwire.errors import InvalidArgumentError
from specwire.messages import RowStatus
from tests.drafter.helpers import open_request

logger = logging.getLogger(__name__)

# context, (prompt_lookup_min, prompt_lookup_max, K), drafts
CASES = [
    ([1, 2, 3, 4, 1, 2, 3, 5, 6], (2, 2, 2), []),
    ([1, 2, 3, 4, 1, 2, 3], (2, 2, 3), [4, 1, 2]),
    ([1, 2, 3, 4, 1, 2, 3], (2, 2, 2), [4, 1]),
    ([1, 2, 3, 4, 1, 2, 3], (1, 1, 3), [4, 1, 2]),
    ([1, 2, 3, 4, 1, 2, 3], (1, 1, 2), [4, 1]),
    ([1, 3, 6, 2, 3, 4, 1, 2, 3], (2, 2, 3), [4, 1, 2]),
    ([1, 3, 6, 2, 3, 4, 1, 2, 3], (1, 1, 2), [6, 2]),
    ([1, 2, 3, 4, 5], (2, 2, 2), []),
    ([1, 2, 3, 4, 1, 2, 3], (4, 4, 2), []),
    ([1, 2, 3, 4, 1, 2, 3], (3, 4, 2), [4, 1]),
    ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], (3, 4, 2), [1, 2]),
    ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], (2, 4, 2), [1, 2]),
    ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], (3, 3, 2), [100, 1]),
    ([], (2, 2, 2), []),
    ([4, 5, 6], (2, 2, 2), []),
    ([1, 1, 1, 1], (1, 2, 3), [1, 1]),
    ([1, 1, 1, 1], (1, 3, 3), [1]),
    ([1, 1, 1, 1], (2, 2, 3), [1, 1]),
    ([1, 2, 1, 2, 1, 2], (1, 3, 4), [1, 2]),
    ([1, 2, 1, 2, 1, 2], (2, 2, 4), [1, 2, 1, 2]),
    ([1, 2, 1, 2, 1, 2], (1, 5, 4), [1, 2]),
    ([5, 1, 2, 9, 1, 2, 8, 1, 2], (2, 2, 3), [9, 1, 2]),
    ([5, 1, 2, 9, 5, 1, 2, 8, 1, 2], (2, 3, 3), [9, 5, 1]),
    ([7], (1, 1, 3), []),
    ([7, 7], (1, 1, 3), [7]),
    ([-5, 2**31 - 1, 3, -5, 2**31 - 1], (1, 2, 2), [3, -5]),
]


def ngram(limits: tuple[int, int, int], max_model_len: int = 1 << 20) -> Ngram:
    return Ngram(limits[0], limits[1], max_num_drafts=limits[2], max_model_len=max_model_len)


@pytest.mark.parametrize(("context", "limits", "expected"), CASES)
def test_golden(context: list[int], limits: tuple[int, int, int], expected: list[int]) -> None:
    method = ngram(limits)
    method.open(3, open_request(context))
    (drafts,) = method.propose([Ask(3, limits[2])])
    assert drafts.status is RowStatus.OK
    assert drafts.token_ids == expected
    assert len(drafts.scores) == len(expected)


@pytest.mark.parametrize(("max_model_len", "expected"), [(6, [3]), (5, []), (4, [])])
def test_never_drafts_past_max_model_len(max_model_len: int, expected: list[int]) -> None:
    method = ngram((1, 2, 5), max_model_len)
    method.open(0, open_request([1, 2, 3, 1, 2]))
    assert method.propose([Ask(0, 5)])[0].token_ids == expected


def test_batch_answers_in_order_of_its_asks() -> None:
    method = ngram((2, 2, 2))
    for seq_id, context in enumerate(([1, 2, 3, 1, 2], [4, 5, 6], [8, 9, 7, 8, 9, 7, 8, 9])):
        method.open(seq_id, open_request(context))
    drafts = method.propose([Ask(2, 2), Ask(1, 2), Ask(0, 2)])
    assert [run.token_ids for run in drafts] == [[7, 8], [], [3, 1]]
    # The middle one does not sample (it is in its prefill): it is not asked for.
    assert [run.token_ids for run in method.propose([Ask(0, 2), Ask(2, 1)])] == [[3, 1], [7]]


def test_fewer_drafts_asked_for_than_k() -> None:
    method = ngram((1, 2, 5))
    method.open(0, open_request([1, 2, 3, 4, 1, 2]))
    assert [method.propose([Ask(0, k)])[0].token_ids for k in (0, 1, 3, 99)] == [[], [3], [3, 4, 1], [3, 4, 1, 2]]


@given(context=st.lists(st.integers(0, 3), max_size=40), limits=st.tuples(st.integers(1, 6), st.integers(1, 6)), cuts=st.lists(st.integers(0, 40)))
def test_equals_brute_force_however_the_tokens_came(context: list[int], limits: tuple[int, int], cuts: list[int]) -> None:
    min_len, max_len = sorted(limits)
    borders = sorted({0, len(context), *(min(cut, len(context)) for cut in cuts)})
    method = ngram((min_len, max_len, 4))
    method.open(0, open_request(context[: borders[0]]))
    for start, end in itertools.pairwise(borders):
        method.append(0, context[start:end])
    length, end = brute_force(context, min_len, max_len)
    drafts = method.propose([Ask(0, 4)])[0]
    assert drafts.token_ids == (context[end : end + 4] if length else [])
    assert drafts.scores == [length / (length + 1)] * len(drafts.token_ids)


def brute_force(context: list[int], min_len: int, max_len: int) -> tuple[int, int]:
    """Length of the longest repeated suffix, and the end of its earliest occurrence."""
    for length in range(min(max_len, len(context) - 1), min_len - 1, -1):
        for end in range(length, len(context)):
            if context[end - length : end] == context[-length:]:
                return length, end
    return 0, 0


def test_longer_matches_score_higher() -> None:
    scores = []
    for length in (1, 2, 4):
        method = ngram((1, 4, 2))
        method.open(0, open_request([1, 2, 3, 4, 9, 8, *[7] * (4 - length), *range(5 - length, 5)]))
        scores.append(method.propose([Ask(0, 2)])[0].scores)
    assert scores == [[1 / 2, 1 / 2], [2 / 3, 2 / 3], [4 / 5, 4 / 5]]


def test_an_id_of_more_than_32_bits_is_refused() -> None:
    method = ngram((1, 2, 2))
    with pytest.raises(InvalidArgumentError, match="32-bit"):
        method.open(0, open_request([1, 1 << 40]))
    method.open(0, open_request([1]))
    with pytest.raises(InvalidArgumentError, match="32-bit"):
        method.append(0, [1 << 40])


@pytest.mark.parametrize("kind", ["no token twice", "no match", "common tokens", "one token"])
def test_time_for_64_sequences_of_32k_tokens(kind: str) -> None:
    """The bound is loose, since the machine may be busy; the measured time is in the log."""
    rng = np.random.default_rng(0)
    make = {
        "no token twice": lambda: rng.permutation(1 << 15),
        "no match": lambda: np.concatenate([rng.integers(0, 49_152, (1 << 15) - 2), [50_001, 50_000]]),
        "common tokens": lambda: rng.integers(0, 100, 1 << 15),
        "one token": lambda: np.zeros(1 << 15, dtype=np.int64),
    }[kind]
    method = ngram((2, 4, 5))
    contexts = [make().tolist() for _ in range(64)]
    started = time.perf_counter()
    for seq_id, context in enumerate(contexts):
        method.open(seq_id, open_request(context))
    open_ms = (time.perf_counter() - started) * 1e3 / 64
    asks = [Ask(seq_id, 5) for seq_id in range(64)]
    runs = []
    for _ in range(9):
        started = time.perf_counter()
        drafts = method.propose(asks)
        runs.append((time.perf_counter() - started) * 1e3)
    logger.warning("%s: propose for 64 x 32k tokens %.2f ms, open %.2f ms each", kind, sorted(runs)[4], open_ms)
    if kind in ("no token twice", "no match"):
        assert not any(run.token_ids for run in drafts)
    assert min(runs) < 50


def test_match_may_overlap_the_suffix_but_is_not_the_suffix() -> None:
    assert longest_suffix_match(np.array([1, 2, 1, 2, 1], dtype=np.int32), 1, 9) == (3, 3)
    assert longest_suffix_match(np.array([1, 2], dtype=np.int32), 1, 9) == (0, 0)
