"""Suffix decoding: hand-made cases, a brute-force twin over own text and past outputs, eviction, tenants, and its time."""

import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.cost import measure_draft_cost
from drafter_svc.method import Ask, Drafts, build_method
from drafter_svc.suffix import Search, Suffix
from drafter_svc.suffix_compiled import CompiledSearch
from drafter_svc.suffix_match import MAX_OCCURRENCES, NO_CONTEXT, NO_TOKEN, ArraySearch, Limits
from drafter_svc.tokens import PaddedTokens
from specwire.config import DrafterConfig
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

Scored = tuple[Fraction, list[int], list[Fraction]]


def make(k: int = 5, depth: int = 24, factor: float = 1.0, min_prob: float = 0.1, **more: int) -> Suffix:
    return Suffix(Limits(depth, factor, min_prob), max_num_drafts=k, **more)


def begin(method: Suffix, seq_id: int, prompt: Sequence[int], output: Sequence[int] = (), tenant: bytes = b"") -> None:
    method.open(seq_id, DraftOpen(0, 1, list(prompt), len(prompt), SamplingParams(), 7, tenant_cache_key=tenant))
    method.append(seq_id, output)


def remember(method: Suffix, output: Sequence[int], tenant: bytes = b"") -> None:
    begin(method, 999, [1], output, tenant)
    method.close(999)


def drafts(method: Suffix, context: Sequence[int], k: int = 99, tenant: bytes = b"") -> Drafts:
    begin(method, 0, context, tenant=tenant)
    (answer,) = method.propose([Ask(0, k)])
    method.close(0)  # all of it was the prompt: no past output comes of it
    assert answer.status is RowStatus.OK
    return answer


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


def reference_path(texts: Sequence[Sequence[int]], ends: list[tuple[int, int]], context: Sequence[int], k: int, limits: Limits) -> Scored:
    """Every match length by itself, over the occurrences (text, index behind it) given from the earliest to the latest."""
    best: Scored = (Fraction(0), [], [])
    for length in range(1, min(limits.max_depth, len(context) + 1)):
        rows = [(text, end) for text, end in ends if length <= end and list(texts[text][end - length : end]) == list(context[-length:])]
        rows = rows[-MAX_OCCURRENCES:]
        if not rows:
            break
        common = min(matching(texts[text][:end], context, limits.max_depth - 1) for text, end in rows)
        num_all, path, scores, total = len(rows) + 1, [], [], Fraction(0)
        for position in range(min(k, int(length * limits.max_spec_factor + 1e-6), limits.max_depth - length)):
            nexts = [texts[text][end + position] for text, end in rows if end + position < len(texts[text])]
            if not nexts:
                break
            counts = Counter(nexts)
            token = next(each for each in reversed(nexts) if counts[each] == max(counts.values()))
            if counts[token] < limits.min_token_prob * num_all:
                break
            path.append(token)
            scores.append(counts[token] / (len(rows) + Fraction(1, common + position)))
            total += Fraction(counts[token], num_all)
            rows = [(text, end) for text, end in rows if end + position < len(texts[text]) and texts[text][end + position] == token]
        if total >= best[0]:
            best = (total, path, scores)
    return best


def matching(text: Sequence[int], context: Sequence[int], most: int) -> int:
    return next((n for n in range(min(most, len(text), len(context))) if text[-1 - n] != context[-1 - n]), min(most, len(text), len(context)))


def reference(context: list[int], outputs: list[list[int]], k: int, limits: Limits) -> Scored:
    own = reference_path([context], [(0, end) for end in range(1, len(context))], context, k, limits)
    for anchor in (4, 1):
        if len(context) < anchor or limits.max_depth <= anchor:
            continue
        ends = [
            (text, end)
            for text, output in enumerate(outputs)
            for end in range(anchor, len(output) + 1)
            if output[end - anchor : end] == context[-anchor:]
        ]
        if ends:
            past = reference_path(outputs, ends[-MAX_OCCURRENCES:], context, k, limits)
            return past if past[0] > own[0] else own
    return own


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


def test_past_outputs_are_drafted_from_and_prompts_are_not() -> None:
    method = make()
    begin(method, 3, [50, 51, 52, 53, 54], [60, 61, 62, 63, 64])
    assert drafts(method, [60, 61]).token_ids == []  # it runs
    method.close(3)
    assert drafts(method, [60, 61]).token_ids == []  # not indexed yet
    assert method.catch_up(256) == 5
    assert method.catch_up(256) == 0
    assert drafts(method, [60, 61]).token_ids == [62, 63]
    assert drafts(method, [50, 51]).token_ids == []
    assert drafts(method, [60, 61, 70, 60, 61]).token_ids == [70, 60]  # on ties the sequence's own
    assert drafts(method, [61, 70, 60, 61, 62]).token_ids == [63, 64]  # here nothing is left to it


def test_no_past_outputs_where_none_are_wanted() -> None:
    method = make(max_cached_requests=0)
    remember(method, [60, 61, 62])
    assert method.catch_up(256) == 0
    assert (method.past.num_requests, method.past.num_tokens, method.past.num_bytes) == (0, 0, 0)
    assert drafts(method, [60, 61]).token_ids == []


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 9)), max_size=20))
def test_the_oldest_outputs_go_first_whoever_they_are_of(outputs: list[tuple[int, list[int], int]]) -> None:
    limits = Limits(8, 1.0, 0.1)
    method = Suffix(limits, max_num_drafts=4, max_cached_requests=4, max_cached_tokens=30)
    for tenant, output, budget in outputs:
        remember(method, output, bytes([tenant]))
        method.catch_up(budget)
    while method.catch_up(5):
        pass
    kept = outputs[-4:]
    while sum(len(output) for _, output, _ in kept) > 30:
        kept = kept[1:]
    assert method.past.num_requests == len(kept)
    assert method.past.num_tokens == sum(len(output) for _, output, _ in kept)
    for tenant in range(3):
        of_tenant = [output for owner, output, _ in kept if owner == tenant]
        for context in itertools.chain.from_iterable((output[: 1 + len(output) // 2], output) for _, output, _ in outputs):
            _, token_ids, _ = reference(context, of_tenant, 4, limits)
            assert drafts(method, context, tenant=bytes([tenant])).token_ids == token_ids
        assert (method.past.corpus(bytes([tenant])) is None) == (not of_tenant)


def test_a_storm_of_outputs_stays_within_its_bounds() -> None:
    method = make(max_cached_requests=50, max_cached_tokens=2000)
    rng = np.random.default_rng(0)
    most = 0
    for index in range(400):
        remember(method, rng.integers(0, 50_000, 100).tolist(), b"%d" % (index % 7))
        method.catch_up(64 * (index % 3))
        assert method.past.num_tokens <= 2000
        most = max(most, method.past.num_bytes)
    assert most < 1_000_000
    remember(method, list(range(5000)))
    method.catch_up(10_000)
    assert (method.past.num_requests, method.past.num_tokens) == (1, 2000)
    assert drafts(method, [3000, 3001, 3002]).token_ids == [3003, 3004, 3005]
    assert drafts(method, [2000, 2001, 2002]).token_ids == []  # of a long output its end


def test_a_tenants_drafts_hold_no_tokens_of_another_one() -> None:
    """Both repeat each other's words, so that there is something to find; only the words that follow tell whose they are."""
    method = make(k=8, depth=16, max_cached_requests=40)
    rng = np.random.default_rng(1)
    secrets = {b"": range(1000, 1100), b"a": range(2000, 2100), b"b": range(3000, 3100)}
    num_drafted: Counter[bytes] = Counter()
    words = [rng.integers(0, 20, 6).tolist() for _ in range(12)]  # that all of them use
    for _ in range(150):
        for tenant, own in secrets.items():
            common = words[rng.integers(12)]
            remember(method, [*common, *rng.choice(own, 4).tolist(), *common, *rng.choice(own, 4).tolist()], tenant)
            method.catch_up(int(rng.integers(0, 60)))
        for tenant, own in secrets.items():
            run = drafts(method, words[rng.integers(12)], tenant=tenant).token_ids
            assert all(token < 20 or token in own for token in run), (tenant, run)
            num_drafted[tenant] += sum(token in own for token in run)
    assert min(num_drafted[tenant] for tenant in secrets) > 100


def test_measuring_costs_leaves_nothing_for_requests() -> None:
    method = make()
    measure_draft_cost(method, 0.05, chunk=256, context_len=600)
    assert method.past.corpus(b"") is None


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
