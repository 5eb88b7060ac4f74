"""Where features are: drafters with a head hear of every block, once and in order, whatever becomes of sequences, drafters and verifiers."""

import dataclasses

import pytest

from coordinator.limits import check_drafter
from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from specwire.messages import FeatureSet, ServiceDescription
from specwire.policy.capacity import check_match, describe_engine
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript, ScriptedDrafter
from tests.scripted.verifier import VerifierScript

SETS = (FeatureSet("head", "hash", (1, 2), 8, "float32"),)
VERIFIER = VerifierScript(feature_sets=SETS)
DRAFTER = DrafterScript(feature_sets=SETS, acceptance=0.6)
PROMPT = list(range(3, 40))


def submit(cluster: Cluster, num_requests: int = 5, max_tokens: int = 60) -> list[Running]:
    return [cluster.submit([*PROMPT, 50 + seed], seed=seed, max_tokens=max_tokens) for seed in range(num_requests)]


def num_accepted(running: list[Running]) -> int:
    counts = [choice.spec_stats.num_accepted_tokens for request in running for choice in request.sink.choices if choice.spec_stats is not None]
    assert counts, "nobody has reported"
    return sum(counts)


def check_told(*drafters: ScriptedDrafter) -> None:
    assert sum(drafter.num_handles for drafter in drafters) > 0
    assert [drafter.num_rows_without_features for drafter in drafters] == [0] * len(drafters)


@pytest.mark.parametrize("grpc", [False, True])
@pytest.mark.parametrize("script", [VERIFIER, dataclasses.replace(VERIFIER, max_num_batched_tokens=20, prefix_caching=False)])
async def test_every_row_that_asks_for_drafts_follows_the_news_of_its_features(script: VerifierScript, grpc: bool) -> None:
    async with Cluster([script], [DRAFTER], grpc=grpc, min_draft_wait_ms=2000) as cluster:
        running = submit(await cluster.all_there())
        for request in running:
            await request.check()
        check_told(*cluster.drafters)
        assert num_accepted(running) > 20


async def test_a_drafter_without_a_head_hears_nothing() -> None:
    async with Cluster([VERIFIER], [DrafterScript()], min_draft_wait_ms=1000) as cluster:
        for request in submit(await cluster.all_there()):
            await request.check()
        assert cluster.drafters[0].num_handles == 0


async def test_both_kinds_side_by_side() -> None:
    async with Cluster([VERIFIER], [DRAFTER, DrafterScript()], min_draft_wait_ms=1000) as cluster:
        running = submit(await cluster.all_there())
        for request in running:
            await request.check()
        check_told(cluster.drafters[0])
        assert cluster.drafters[1].num_handles == 0
        assert cluster.drafters[1].num_rows > 0


async def test_a_drafter_that_is_started_anew_hears_everything_again() -> None:
    """Without a row at the verifier that would compute anything anew."""
    script = dataclasses.replace(VERIFIER, delay_s=0.005)  # decoding plainly would be over before the drafter is back
    async with Cluster([script], [DRAFTER], min_draft_wait_ms=1000) as cluster:
        running = submit(await cluster.all_there(), max_tokens=400)
        for _ in range(2):
            done = len(running[0].sink.choices[0].token_ids)
            await cluster.until(lambda done=done: all(len(request.sink.choices[0].token_ids) > done + 10 for request in running))
            before = cluster.drafters[0]
            await cluster.restart_drafter(0)
            await cluster.until(lambda: cluster.drafters[0].num_rows > 0)
            check_told(before)
        for request in running:
            await request.check()
        check_told(cluster.drafters[0])
        opens = [open_ for message in cluster.verifiers[0].received for open_ in message.opens]
        assert len(opens) == len(running), "a sequence was opened anew at the verifier"


async def test_sequences_without_drafts_for_a_while_are_told_of_later() -> None:
    """K is 0 for more than two sequences: nobody is asked, and the blocks of meanwhile are told when there are fewer."""
    async with Cluster([VERIFIER], [DRAFTER], schedule=[[1, 2, 5], [3, 16, 0]], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        running = [cluster.submit([*PROMPT, 50 + seed], seed=seed, max_tokens=40 if seed else 120) for seed in range(4)]
        for request in running:
            await request.check()
        check_told(*cluster.drafters)
        assert num_accepted(running[:1]) > 0


async def test_preempted_sequences_have_another_place() -> None:
    script = dataclasses.replace(VERIFIER, num_usable_blocks=70, prefix_caching=False)
    async with Cluster([script], [DRAFTER], min_draft_wait_ms=1000) as cluster:
        running = submit(await cluster.all_there(), num_requests=6)
        for request in running:
            await request.check()
        assert cluster.engine.counters.num_preemptions > 0
        check_told(*cluster.drafters)


async def test_sequences_of_a_lost_verifier_are_told_of_anew() -> None:
    async with Cluster([VERIFIER, VERIFIER], [DRAFTER, DRAFTER], min_draft_wait_ms=1000) as cluster:
        running = submit(await cluster.all_there(), max_tokens=100)
        await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 10 for request in running))
        await cluster.kill_verifier(0)
        for request in running:
            await request.check()
        check_told(*cluster.drafters)


def description(*heads: str) -> ServiceDescription:
    sets = tuple(FeatureSet(name, f"hash-{name}", (), 8, "float32") for name in heads)
    return ServiceDescription("m", "i", 100, 64, 5, 4, max_num_batched_tokens=64, feature_sets=sets)


def test_a_drafter_needs_verifiers_that_keep_its_features() -> None:
    engine = describe_engine(CoordinatorConfig(), [description("a", "b")])
    for heads in ((), ("a",), ("b", "a")):
        check_drafter(engine, description(*heads))
    with pytest.raises(
        FailedPreconditionError, match=r"the features of c \(hash-c\), but the verifiers keep a \(hash-a\), b .*start them with --features"
    ):
        check_drafter(engine, description("a", "c"))
    with pytest.raises(FailedPreconditionError, match="the verifiers keep none"):
        check_drafter(describe_engine(CoordinatorConfig(), [description()]), description("a"))


def test_verifiers_keep_the_same_features() -> None:
    check_match(description("a", "b"), description("b", "a"))
    with pytest.raises(FailedPreconditionError, match="it keeps features of these heads: none, but the first verifier: a; give all verifiers"):
        check_match(description("a"), description())
