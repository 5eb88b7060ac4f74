"""Past outputs that suffix decoding drafts from: what is kept, for how long, and for whom."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.cost import measure_draft_cost
from drafter_svc.suffix import Suffix
from drafter_svc.suffix_match import Limits
from tests.drafter.suffix_reference import begin, drafts, make, reference, remember


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
