"""Suffix decoding: hand-made cases, a brute-force twin over own text and past outputs, and its time."""

import itertools
import logging
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.method import Ask, build_method
from drafter_svc.suffix import Search, Suffix
from drafter_svc.suffix_compiled import CompiledSearch
from drafter_svc.suffix_match import NO_CONTEXT, NO_TOKEN, ArraySearch, Limits
from drafter_svc.tokens import PaddedTokens
from specwire.config import DrafterConfig
from specwire.errors import InvalidArgumentError
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.suffix_reference import begin, drafts, make, reference, remember

logger = logging.getLogger(__name__)


@pytest.mark.parametrize(
    ("context", "options", "expected"),
    [
        ([], {}, []),
        ([7], {}, []),
        ([1, 2, 3], {}, []),
        ([7, 7], {}, [7]),
        ([1, 2, 3, 4, 1, 2, 3], {}, [4, 1, 2]),  # as long as the match
        ([1, 2, 3, 4, 1, 2, 3], {"k": 2}, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], {"factor": 1.5}, [4, 1, 2, 3]),
        ([1, 2, 3, 4, 1, 2, 3], {"factor": 0.4}, [4]),
        ([1, 2, 3, 4, 1, 2, 3], {"factor": 0.0}, []),
        ([1, 2, 3, 4, 1, 2, 3], {"depth": 5}, [4, 1]),  # match and draft together
        ([1, 2, 3, 4, 1, 2, 3], {"depth": 2}, [4]),
        ([1, 2, 3, 4, 1, 2, 3], {"depth": 1}, []),
        ([1, 2, 3, 4, 1, 2, 3], {"min_prob": 0.5}, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], {"min_prob": 0.51}, []),  # seen once: half
        ([1, 8, 1, 8, 1, 9, 7, 1], {}, [8]),  # twice of three times
        ([1, 8, 1, 9, 1], {}, [9]),  # as often: the latest
        ([5, 1, 8, 1, 8, 1, 8, 6, 5, 1], {"k": 1}, [8]),  # four times in general is more than once behind 5
        ([1, 2, 3, 4, 1, 2, 3], {"max_model_len": 8}, [4]),
        ([1, 2, 3, 4, 1, 2, 3], {"max_model_len": 7}, []),
        ([0, 2**31 - 1, 3, 0, 2**31 - 1], {}, [3, 0]),
    ],
)
def test_golden(context: list[int], options: dict, expected: list[int]) -> None:
    answer = drafts(make(**options), context)
    assert answer.token_ids == expected
    assert len(answer.scores) == len(expected)


def test_scores_rise_with_the_match_and_with_the_share_of_its_occurrences() -> None:
    method = make()
    assert drafts(method, [9, 5, 9]).scores == [1 / 2]  # as a lookup's: m / (m + 1)
    assert drafts(method, [1, 2, 3, 4, 1, 2, 3]).scores == pytest.approx([3 / 4, 4 / 5, 5 / 6])
    assert drafts(method, [1, 8, 1, 8, 1, 9, 1]).scores == pytest.approx([2 / 4])  # (2 of 3) + 1
    assert drafts(method, [1, 8, 1, 8, 1, 8, 1, 8, 1, 8, 1], k=1).scores[0] > 0.8


LIMITS = st.builds(Limits, st.integers(1, 9), st.sampled_from([0.0, 0.5, 1.0, 1.7, 4.0]), st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.9]))
TOKENS = st.one_of(st.lists(st.integers(0, 1), max_size=90), st.lists(st.integers(0, 4), max_size=60))


def compiled(limits: Limits, k: int) -> Search:
    return CompiledSearch(limits, k, max(limits.max_depth, k))


@pytest.mark.parametrize("search", [ArraySearch, compiled])
@given(context=TOKENS, outputs=st.lists(TOKENS, max_size=4), limits=LIMITS, k=st.integers(1, 7), cuts=st.lists(st.integers(0, 90)))
def test_equals_brute_force_however_the_tokens_came(
    search: Callable[[Limits, int], Search], context: list[int], outputs: list[list[int]], limits: Limits, k: int, cuts: list[int]
) -> None:
    method = Suffix(limits, max_num_drafts=k, search=search(limits, k))
    for output in outputs:
        remember(method, output)
        method.catch_up(3)
    while method.catch_up(3):
        pass
    borders = sorted({0, len(context), *(min(cut, len(context)) for cut in cuts)})
    begin(method, 0, [])
    for start, end in itertools.pairwise(borders):
        method.append(0, context[start:end])
        method.propose([Ask(0, k)])
    (answer,) = method.propose([Ask(0, k)])
    _, token_ids, scores = reference(context, outputs, k, limits)
    assert answer.token_ids == token_ids
    assert answer.scores == pytest.approx([float(score) for score in scores])


@pytest.mark.parametrize("seed", range(6))
def test_both_searches_agree_on_long_texts(seed: int) -> None:
    """Longer than what the compiled one compares at once."""
    rng = np.random.default_rng(seed)
    limits, size = Limits(24, 1.0, 0.1), int(rng.integers(500, 1500))
    ids = {
        0: rng.integers(0, 2, size), 1: rng.integers(0, 30, size), 2: (rng.random(size) < 0.03).astype(int), 3: np.arange(size) % 7,
        4: np.concatenate([rng.permutation(40), np.tile(rng.permutation(300) + 40, 5)]), 5: rng.permutation(size),
    }[seed]  # fmt: skip
    text = PaddedTokens(24, NO_CONTEXT, NO_TOKEN)
    plain, fast = ArraySearch(limits, 5), compiled(limits, 5)
    num_drafted = 0
    for token in ids.tolist():
        text.append(np.array([token], dtype=np.int32))
        expected, found = plain.own(text, 5), fast.own(text, 5)
        assert found.token_ids == expected.token_ids, f"at {text.num_tokens}"
        assert found.scores == pytest.approx(expected.scores)
        num_drafted += len(found.token_ids)
    assert (num_drafted > 500) == (seed != 5)


def test_without_numba_the_slower_search_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "drafter_svc.suffix_compiled")
    assert drafts(make(), [1, 2, 3, 1, 2]).token_ids == [3, 1]
    assert "without numba; install specwire[engine]" in caplog.text


def test_ids_that_can_not_be_tokens_are_refused() -> None:
    method = make()
    begin(method, 0, [1])
    with pytest.raises(InvalidArgumentError, match="32-bit"):
        method.append(0, [1 << 40])
    with pytest.raises(InvalidArgumentError, match="token id is -5"):
        method.append(0, [-5])
    with pytest.raises(InvalidArgumentError, match="token id is -1"):
        begin(method, 1, [-1])


def test_configured() -> None:
    spec = SpeculativeConfig.from_dict({"method": "suffix", "suffix_decoding_max_tree_depth": 6, "num_speculative_tokens": 3})
    method = build_method(DrafterConfig(speculative_config=spec, max_num_seqs=9))
    description = method.description
    assert (description.method, description.model_id, description.max_num_draft_tokens, description.max_num_seqs) == ("suffix", "suffix-6", 3, 9)


@pytest.mark.parametrize("kind", ["no match", "common tokens", "one token", "two tokens", "long runs"])
def test_time_for_64_sequences_of_32k_tokens(kind: str) -> None:
    """The bound is loose, since the machine may be busy; the measured time is in the log."""
    rng = np.random.default_rng(0)
    size = 1 << 15
    text = {
        "no match": lambda: rng.permutation(size),
        "common tokens": lambda: rng.integers(0, 100, size),
        "one token": lambda: np.zeros(size, dtype=np.int64),
        "two tokens": lambda: np.arange(size) % 2,
        "long runs": lambda: (rng.random(size) < 0.03).astype(int),
    }[kind]().tolist()  # fmt: skip
    method = make()
    for seq_id in range(64):
        begin(method, seq_id, text)
    asks = [Ask(seq_id, 5) for seq_id in range(64)]
    runs = []
    for _ in range(5):
        started = time.thread_time()
        answers = method.propose(asks)
        runs.append((time.thread_time() - started) * 1e3)
    logger.warning("%s: propose for 64 x 32k tokens %.2f ms", kind, sorted(runs)[2])
    assert all(bool(answer.token_ids) == (kind != "no match") for answer in answers) or kind == "common tokens"
    assert min(runs) < 200
