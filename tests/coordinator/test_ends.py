"""Where a sequence ends: blocks of accepted tokens are cut exactly where a one-token-a-step decoder stops."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.stop import StopRules
from specwire.messages import FinishReason, TokenOrigin
from specwire.tokenizer import Tokenizer
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.cluster import Cluster, Running
from tests.scripted.collect import CollectedChoice
from tests.scripted.drafter import DrafterScript
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.target import Prefix, Target, scripted_logprobs
from tests.scripted.verifier import VerifierScript

K = 7
PROMPT = [5, 6, 7]
MAX_MODEL_LEN = 512


@pytest.fixture(params=[(0, 1), (0, 2), (K, 2)], ids=["one token a step", "run-ahead", "drafts"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    k, w = request.param
    drafters = [DrafterScript()] if k else []
    async with Cluster(drafters=drafters, k=K, max_outstanding_rounds=w, min_draft_wait_ms=1000) as cluster:
        yield await cluster.all_there()


def reference(request: Running, eos_token_ids: tuple[int, ...] = (2,), tokenizer: Tokenizer | None = None) -> CollectedChoice:
    """The one-token-a-step decoder."""
    params, target = request.params, request.cluster.verifiers[0].target
    assert params.seed is not None
    rules = StopRules(params, eos_token_ids, len(request.prompt), MAX_MODEL_LEN, tokenizer)
    prefix, choice = Prefix(params.seed, 0, request.prompt), CollectedChoice(text="" if params.stop else None)
    while choice.finish_reason is None:
        token = target.sample(prefix.state)
        outcome = rules.push([token])
        choice.token_ids.append(token)
        if params.logprobs is not None:
            choice.logprobs.append(scripted_logprobs(prefix.state, token, params.logprobs))
        prefix.append(token)
        if choice.text is not None:
            choice.text += outcome.text or ""
        choice.finish_reason, choice.stop_cause = outcome.finish_reason, outcome.stop_cause
    return choice


async def check(request: Running, **reference_arguments: Any) -> CollectedChoice:
    """Compares a request with the reference in everything that a client sees."""
    got, expected = (await request.sink.wait()).choices[0], reference(request, **reference_arguments)
    assert request.sink.error is None
    assert got.token_ids == expected.token_ids
    assert (got.finish_reason, got.stop_cause, got.text) == (expected.finish_reason, expected.stop_cause, expected.text)
    assert got.logprobs == expected.logprobs
    assert got.usage is not None
    assert got.usage.num_prompt_tokens == len(request.prompt)
    assert got.usage.num_generated_tokens == len(expected.token_ids)
    assert len(got.origins) == len(got.token_ids)
    return got


@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_max_tokens(cluster: Cluster, logprobs: int | None) -> None:
    for max_tokens in range(1, 2 * K + 4):
        got = await check(cluster.submit(PROMPT, seed=9, max_tokens=max_tokens, logprobs=logprobs))
        assert got.finish_reason is FinishReason.LENGTH


async def test_stop_token_at_each_position(cluster: Cluster) -> None:
    tokens = cluster.verifiers[0].target.generate(PROMPT, 2 * K + 4, key=9)
    for position, token in enumerate(tokens):
        got = await check(cluster.submit(PROMPT, seed=9, max_tokens=100, stop_token_ids=(token,)))
        assert len(got.token_ids) == tokens.index(token) + 1 <= position + 1
        assert (got.finish_reason, got.stop_cause) == (FinishReason.STOP, token)


async def test_min_tokens_delay_a_stop(cluster: Cluster) -> None:
    tokens = cluster.verifiers[0].target.generate(PROMPT, 30, key=9)
    for min_tokens in range(12):
        await check(cluster.submit(PROMPT, seed=9, max_tokens=30, min_tokens=min_tokens, stop_token_ids=tuple({tokens[2], tokens[5], tokens[9]})))


@pytest.mark.parametrize("position", range(2 * K + 2))
async def test_eos_at_each_position(position: int) -> None:
    eos = Target(VerifierScript().alphabet).generate(PROMPT, position + 1, key=9)[position]
    async with Cluster([VerifierScript(eos_token_ids=(eos,))], [DrafterScript()], k=K, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        got = await check(cluster.submit(PROMPT, seed=9, max_tokens=100), eos_token_ids=(eos,))
        assert (got.finish_reason, got.stop_cause) == (FinishReason.STOP, eos)
        ignoring = await check(cluster.submit(PROMPT, seed=9, max_tokens=20, ignore_eos=True), eos_token_ids=())
        assert ignoring.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_at_each_position(k: int, include: bool) -> None:
    tokenizer = Tokenizer(make_spec())
    drafters = [byte_drafter_script(acceptance=1.0)] if k else []
    async with Cluster([byte_verifier_script()], drafters, k=K, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        text = tokenizer.decode(cluster.verifiers[0].target.generate([104, 105], 24, key=9))
        for start in range(20):
            stop = text[start : start + 3]
            request = cluster.submit([104, 105], seed=9, max_tokens=60, stop=(stop, "never"), include_stop_str_in_output=include)
            got = await check(request, eos_token_ids=(256,), tokenizer=tokenizer)
            assert got.stop_cause == stop
            assert got.text == text[: text.index(stop) + (3 if include else 0)]


@pytest.mark.parametrize("num_left", range(1, 12))
async def test_end_of_the_context(cluster: Cluster, num_left: int) -> None:
    prompt = [3 + i % 900 for i in range(MAX_MODEL_LEN - num_left)]
    got = await check(cluster.submit(prompt, seed=1, max_tokens=None))
    assert got.finish_reason is FinishReason.LENGTH
    assert len(got.token_ids) == num_left


async def test_drafter_window_ends_before_the_context() -> None:
    """Drafts shrink towards the drafter's window, and the sequence goes on without them."""
    async with Cluster(drafters=[DrafterScript(max_model_len=40)], k=K, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        got = await check(cluster.submit(PROMPT, seed=1, max_tokens=100))
        assert got.spec_stats is not None
        assert 20 < got.spec_stats.num_accepted_tokens == got.spec_stats.num_draft_tokens <= 37
        assert cluster.drafters[0].num_open == 0
        assert cluster.engine.counters.fallbacks == {}
        await check(cluster.submit([3] * 60, seed=1, max_tokens=10))


async def test_origins_and_statistics() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.7)], k=4, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        verifier = cluster.verifiers[0]
        got = await check(cluster.submit(PROMPT, seed=1, max_tokens=200))
        counts = {origin: got.origins.count(origin) for origin in TokenOrigin}
        stats = got.spec_stats
        assert stats is not None
        # The first token, and the last one if no other may follow it.
        assert 1 <= counts[TokenOrigin.PLAIN] <= 2
        assert sum(counts.values()) == 200
        assert stats.num_drafts == counts[TokenOrigin.RECOVERED] + counts[TokenOrigin.BONUS] + (got.origins[-1] == TokenOrigin.ACCEPTED)
        assert stats.num_draft_tokens == verifier.num_draft_tokens
        assert stats.num_accepted_tokens == verifier.num_accepted_tokens == sum(stats.accepted_per_position)
        assert len(stats.accepted_per_position) == 4
        assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
        assert stats.num_steps == stats.num_drafts + counts[TokenOrigin.PLAIN]
        assert stats.num_preemptions == 0
        assert not stats.synthetic


@pytest.mark.parametrize("max_draft_tokens", [0, 1, 3, 100])
async def test_max_draft_tokens(max_draft_tokens: int) -> None:
    async with Cluster(drafters=[DrafterScript()], k=4, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        other = cluster.submit([8, 9], seed=2, max_tokens=50)
        got = await check(cluster.submit(PROMPT, seed=1, max_tokens=50, max_draft_tokens=max_draft_tokens))
        await check(other)
        stats = got.spec_stats
        assert stats is not None
        assert all(count == 0 for count in stats.accepted_per_position[max_draft_tokens:])
        assert (stats.num_drafts > 0) == (max_draft_tokens > 0)
        if max_draft_tokens == 0:
            assert set(got.origins) == {TokenOrigin.PLAIN}
