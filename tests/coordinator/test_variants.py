"""The canary: shares, what its requests are given, that tokens stay the same, and its ends while requests run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.exposition import collect
from coordinator.variants import BASE, CANARY
from specwire.canary_config import changed
from specwire.cli import commands  # noqa: F401 - registers the commands
from specwire.cli.app import app
from specwire.client import AsyncClient
from specwire.errors import FailedPreconditionError, InvalidArgumentError, SpecwireError, UnauthenticatedError, UnsupportedError
from specwire.messages import CanaryAction, GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.http.serving import http_served
from tests.scripted.cluster import Cluster, Running
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript
from tests.security.key_file import OTHER_KEY, File, entry

START, SET_SHARE, PROMOTE, ROLL_BACK = CanaryAction
NO_DRAFTS = '{"num_speculative_tokens_per_batch_size": [[1, 1, 0]]}'


def submit(cluster: Cluster, variant: str, seed: int, max_tokens: int = 30) -> Running:
    """A request for a variant."""
    params, prompt = SamplingParams(seed=seed, max_tokens=max_tokens), [5, 6, 7 + seed % 50]
    sink = CollectingSink(1, on_tokens=cluster.advance)
    return Running(cluster, prompt, params, sink, cluster.engine.submit(GenerateRequest(prompt, params, variant=variant), sink))


def most_drafts(cluster: Cluster) -> int:
    """Of a row, in the rounds since the last look."""
    rounds = cluster.verifiers[0].received
    most = max((len(row.draft_tokens) for round_ in rounds for row in round_.rows), default=0)
    rounds.clear()
    return most


async def test_shares_and_tokens_over_1000_requests() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.8)], k=4, max_queue=2000) as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.1, '{"num_speculative_tokens": 2}')
        for batch in range(10):
            await asyncio.gather(*[submit(cluster, "", seed, 4).check() for seed in range(100 * batch, 100 * batch + 100)])
            base, canary = cluster.engine.variants.status()
            assert abs(canary.num_requests - 10 * (batch + 1)) <= 1, "the share is kept all the time"
        assert (base.name, canary.name, base.share, canary.share) == (BASE, CANARY, 0.9, 0.1)
        assert base.num_requests + canary.num_requests == base.num_ended + canary.num_ended == 1000
        assert abs(canary.num_ended / 1000 - 0.1) < 0.02
        for variant in (base, canary):
            assert variant.num_generated_tokens == 4 * variant.num_ended
            assert variant.num_draft_tokens >= variant.num_accepted_tokens > 0
            assert variant.first_token_ms > 0


@pytest.mark.parametrize("grpc", [False, True])
async def test_both_have_their_own_k_and_equal_tokens(grpc: bool) -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.8)], k=5, grpc=grpc) as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.0, '{"num_speculative_tokens": 2}')
        mixed = [submit(cluster, variant, seed) for seed in range(4) for variant in (BASE, CANARY, "")]
        await asyncio.gather(*[running.check() for running in mixed])
        for seed in range(4):
            assert len({tuple(running.sink.choices[0].token_ids) for running in mixed[3 * seed : 3 * seed + 3]}) == 1
        for running, most in zip(mixed, (5, 2, 5) * 4, strict=True):
            spec = running.sink.choices[0].spec_stats
            assert spec is not None
            assert spec.num_accepted_tokens > 0
            assert 0 < spec.num_draft_tokens <= most * spec.num_drafts
        base, canary = cluster.engine.variants.status()
        assert (base.num_ended, canary.num_ended) == (8, 4)
        assert base.num_draft_tokens / base.num_drafts > 2 >= canary.num_draft_tokens / canary.num_drafts
        if not grpc:
            most_drafts(cluster)
            await submit(cluster, CANARY, 9).check()
            assert most_drafts(cluster) == 2


async def test_base_without_drafts_beside_a_canary_with_them() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=1.0)], k=4, schedule=[[1, 1, 0]]) as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.0, '{"num_speculative_tokens_per_batch_size": [[1, 1, 3]]}')
        running = [submit(cluster, variant, seed) for seed in range(3) for variant in (BASE, CANARY)]
        await asyncio.gather(*[each.check() for each in running])
        stats = [each.sink.choices[0].spec_stats for each in running]
        assert [spec.num_draft_tokens > 0 for spec in stats if spec is not None] == [False, True] * 3


@pytest.mark.parametrize(("action", "most"), [(PROMOTE, 2), (ROLL_BACK, 5)])
async def test_ends_while_requests_run(action: CanaryAction, most: int) -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.9)], k=5) as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.5, '{"num_speculative_tokens": 2}')
        running = [submit(cluster, variant, seed, 90) for seed, variant in enumerate((BASE, CANARY))]
        await cluster.until(lambda: all(len(each.sink.choices[0].token_ids) > 10 for each in running))
        base, canary = cluster.engine.set_canary(action, 0.0, "")
        assert (base.share, canary.share) == (0, 0)
        assert cluster.engine.variants.status() == ()
        until = cluster.num_steps + 3  # what was planned before
        await cluster.until(lambda: cluster.num_steps >= until)
        most_drafts(cluster)
        await asyncio.gather(*[each.check() for each in running], submit(cluster, CANARY, 8).check(), submit(cluster, "", 9).check())
        assert most_drafts(cluster) == most
        await cluster.restart_verifier(0)
        await submit(cluster, "", 10).check()
        assert most_drafts(cluster) == most, "a lane that comes anew has the same"
        effective = {setting.key: setting.value for setting in cluster.engine.speculation}
        assert effective["num_speculative_tokens_per_batch_size"][0][2] == most
        cluster.engine.set_canary(START, 0.5, '{"num_speculative_tokens": 1}')


async def test_what_is_refused() -> None:
    async with Cluster(drafters=[DrafterScript()], k=4) as cluster:
        await cluster.all_there()
        set_canary = cluster.engine.set_canary
        for action in (SET_SHARE, PROMOTE, ROLL_BACK):
            with pytest.raises(FailedPreconditionError, match="no canary runs"):
                set_canary(action, 0.5, "")
        refusals: list[tuple[float, str, type[SpecwireError], str]] = [
            (1.5, NO_DRAFTS, InvalidArgumentError, "150%"),
            (float("nan"), NO_DRAFTS, InvalidArgumentError, "0% to 100%"),
            (0.1, "{", InvalidArgumentError, "no JSON"),
            (0.1, "{}", InvalidArgumentError, "that of all requests"),
            (0.1, '{"num_speculative_tokens": 4}', InvalidArgumentError, "that of all requests"),
            (0.1, '{"num_speculative_tokens": 5}', InvalidArgumentError, "is 5, but the services were started for 4"),
            (0.1, '{"num_speculative_tokens": 0}', InvalidArgumentError, "num_speculative_tokens is 0"),
            (0.1, '{"num_speculative_tokens_per_batch_size": [[2, 3, 1]]}', InvalidArgumentError, "must start at 1"),
            (0.1, '{"num_speculative_token": 3}', InvalidArgumentError, "did you mean 'num_speculative_tokens'"),
            (
                0.1,
                '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}',
                UnsupportedError,
                "are started with it",
            ),
            (0.1, '{"method": "suffix"}', FailedPreconditionError, "no drafter that is connected has it (connected: scripted)"),
            (0.1, '{"method": null}', UnsupportedError, "num_speculative_tokens_per_batch_size [[1, 1, 0]]"),
            (0.1, '{"enable_adaptive_verification": 1}', InvalidArgumentError, "must be true or false"),
        ]
        for share, config, kind, text in refusals:
            with pytest.raises(kind) as error:
                set_canary(START, share, config)
            assert text in str(error.value)
        set_canary(START, 0.1, NO_DRAFTS)
        with pytest.raises(FailedPreconditionError, match="runs already"):
            set_canary(START, 0.1, NO_DRAFTS)
        with pytest.raises(UnsupportedError, match="'blue' is not served; only base and canary"):
            submit(cluster, "blue", 1)
    async with Cluster(k=4) as cluster:
        await cluster.ready()
        with pytest.raises(FailedPreconditionError, match="nothing is drafted here"):
            cluster.engine.set_canary(START, 0.1, NO_DRAFTS)


def test_changes_keep_what_depends_on_k() -> None:
    base = SpeculativeConfig(num_speculative_tokens=3, rejection_sample_method="synthetic", synthetic_acceptance_rates=(0.9, 0.5, 0.1))
    result = changed(base, '{"num-speculative-tokens": 2}', 3)
    assert (result.num_speculative_tokens, result.synthetic_acceptance_rates) == (2, (0.9, 0.5))
    scheduled = SpeculativeConfig(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=((1, 4, 3), (5, 8, 1)))
    assert changed(scheduled, '{"num_speculative_tokens": 2}', 3).num_speculative_tokens_per_batch_size is None


async def test_under_adaptive_verification_it_is_a_ceiling() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.9)], k=4, adaptive=True, canary_config=NO_DRAFTS, canary_share=0.5) as cluster:
        await cluster.all_there()
        running = [submit(cluster, variant, seed, 60) for seed in range(3) for variant in (BASE, CANARY)]
        await asyncio.gather(*[each.check() for each in running])
        base, canary = cluster.engine.variants.status()
        assert (base.num_ended, canary.num_ended, canary.num_draft_tokens) == (3, 3, 0)
        assert base.num_accepted_tokens > 0


async def test_metrics_by_variant() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.8)], k=4) as cluster:
        await cluster.all_there()
        assert not [sample for sample in collect(cluster.engine) if "variant" in sample.metric.name]
        cluster.engine.set_canary(START, 0.25, NO_DRAFTS)
        await asyncio.gather(*[submit(cluster, "", seed).check() for seed in range(8)])

        def values() -> dict[tuple[str, str], Any]:
            samples = [sample for sample in collect(cluster.engine) if "variant_" in sample.metric.name]
            return {(sample.metric.name.partition("variant_")[2].removesuffix("_total"), sample.label_values[0]): sample.value for sample in samples}

        seen = values()
        assert (seen["share_ratio", BASE], seen["share_ratio", CANARY]) == (0.75, 0.25)
        assert seen["sequences", BASE] + seen["sequences", CANARY] == 8
        assert seen["accepted_tokens", BASE] > 0 == seen["drafts", CANARY]
        assert seen["time_per_token_seconds", CANARY].count == seen["sequences", CANARY] > 0
        cluster.engine.set_canary(ROLL_BACK, 0.0, "")
        after = values()
        assert after.keys() == seen.keys() - {("share_ratio", BASE), ("share_ratio", CANARY)}


async def test_from_the_command_line_and_over_http(socket_dir: Path, tmp_path: Path) -> None:
    keys = File(tmp_path / "keys.yaml")
    keys.write(entry("red", OTHER_KEY))
    key = CliRunner().invoke(app, ["keys", "new", "operator", "--file", keys.path, "--may-operate"]).stdout.strip()
    async with http_served(socket_dir, coordinator={"api_keys": keys.path}) as served:
        address = f"unix:{socket_dir}/coordinator.sock"

        async def canary(*arguments: str, status: int = 0) -> str:
            command = ["canary", *arguments, "--address", address, "--api-key", key]
            result = await asyncio.to_thread(CliRunner().invoke, app, command)
            assert result.exit_code == status, result.output
            return result.output

        assert "No canary runs" in await canary("status")
        assert "The canary runs" in await canary("start", '{"num_speculative_tokens": 1}', "--percent", "20")
        body = {"prompt": "a", "max_tokens": 30, "temperature": 0, "seed": 1, "return_token_origins": True}
        answers = {}
        for variant in (BASE, CANARY):
            answer = await served.post("/v1/completions", body, x_specwire_variant=variant, authorization=f"Bearer {key}")
            answers[variant] = answer.json["choices"][0]
        assert answers[BASE]["text"] == answers[CANARY]["text"]
        base_k, canary_k = (
            answers[variant]["speculation"]["num_draft_tokens"] / answers[variant]["speculation"]["num_drafts"] for variant in answers
        )
        assert canary_k == 1 < base_k
        wrong = await served.post("/v1/completions", body, x_specwire_variant="blue", authorization=f"Bearer {key}")
        assert (wrong.status, "'blue' is not served" in wrong.json["error"]["message"]) == (400, True)

        shown = json.loads(await canary("status", "--json"))["variants"]
        assert [(variant["name"], variant["share"], variant["num_ended"]) for variant in shown] == [(BASE, 0.8, 1), (CANARY, 0.2, 1)]
        await canary("share", "30")
        async with AsyncClient(address, api_key=OTHER_KEY) as client:
            assert (await client.get_status()).variants[1].share == pytest.approx(0.3)
            with pytest.raises(UnauthenticatedError, match="may_operate"):
                await client.set_canary(PROMOTE)
        assert "write its configuration into specwire.yaml" in await canary("promote")
        assert "no canary runs" in await canary("rollback", status=1)
