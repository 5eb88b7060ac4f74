"""Verifiers that come back with another model: refused while anybody may need the one before, served once nobody does."""

import asyncio
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.server import CoordinatorServer
from coordinator.stream import BatchStream
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig
from specwire.errors import UnavailableError
from specwire.messages import CanaryAction, GenerateRequest, TokenizerSpec
from specwire.sampling_params import SamplingParams
from specwire.tokenizer import fingerprint
from tests.coordinator.adaptive_cluster import adaptive_cluster, drafter
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import VerifierScript

PROMPT = [5, 6, 7, 8, 9]
OTHER: dict[str, Any] = {"weights_hash": "others", "alphabet": tuple(range(3, 500))}


async def test_a_sole_verifier_may_come_back_as_another_model(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.7)], k=4, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        before = cluster.submit(PROMPT, seed=1, max_tokens=30)
        await before.check()
        await cluster.restart_verifier(0, **OTHER, max_model_len=100, max_num_seqs=3, max_num_draft_tokens=2)
        await cluster.until(lambda: cluster.engine.description is not None and cluster.engine.description.verifier.weights_hash == "others")
        engine = (await cluster.all_there()).engine.description
        assert engine is not None
        assert (engine.max_model_len, engine.max_num_seqs, engine.num_speculative_tokens, len(engine.schedule)) == (100, 3, 2, 4)
        assert "another model is served from now on: verifier v0:1: its weights_hash is 'others', but" in caplog.text
        after = [cluster.submit(PROMPT, seed=seed, max_tokens=90) for seed in range(8)]
        for running in after:
            await running.check()
        assert after[1].expected(num_tokens=30) != before.sink.choices[0].token_ids, "the models differ"
        assert cluster.engine.counters.num_verifier_refusals == 0
        k = {setting.key: setting.value for setting in cluster.engine.speculation}["num_speculative_tokens"]
        assert (k, max(len(row.draft_tokens) for round_ in cluster.verifiers[0].received for row in round_.rows)) == (2, 2)
        await cluster.restart_verifier(0, alphabet=tuple(range(3, 1000)), weights_hash="weights")
        await cluster.until(lambda: not cluster.engine.ready.is_ready)
        await (await cluster.ready()).submit(PROMPT, seed=2, max_tokens=50).check()


@pytest.mark.parametrize("waits", [1, 2])
async def test_not_while_a_request_of_the_one_before_is_left(waits: int) -> None:
    """It goes on exactly where the model comes back in time; where not, it ends with an error that says why, and then the other one is served."""
    async with Cluster(verifier_wait_s=0.6 if waits == 2 else 60) as cluster:
        await cluster.ready()
        alphabet = cluster.verifiers[0].script.alphabet
        running = cluster.submit(PROMPT, seed=1, max_tokens=400)
        expected = running.expected()
        await cluster.until(lambda: len(running.sink.choices[0].token_ids) > 5)
        await cluster.restart_verifier(0, **OTHER)
        await cluster.until(lambda: cluster.engine.counters.num_verifier_refusals > 0)
        reason = cluster.engine.ready.reason
        parts = (
            "weights_hash is 'others'",
            "is 'weights'",
            "once no request is left",
            "1 are",
            f"at most for {cluster.engine._config.verifier_wait_s:g} s",
        )
        assert [part for part in parts if part not in reason] == []
        with pytest.raises(UnavailableError, match="weights_hash is 'others'"):
            cluster.submit(PROMPT, seed=2, max_tokens=5)
        if waits == 1:
            await cluster.restart_verifier(0, weights_hash="weights", alphabet=alphabet)
            await running.check()
            return
        error = (await running.sink.wait()).error
        assert error is not None
        assert (error.code, "weights_hash is 'others'" in error.message) == (grpc.StatusCode.UNAVAILABLE.value[0], True)
        tokens = running.sink.choices[0].token_ids
        assert tokens == expected[: len(tokens)], "not one token of another model"
        await (await cluster.ready()).submit(PROMPT, seed=3, max_tokens=30).check()


@pytest.mark.parametrize("is_away", [False, True])
async def test_not_while_another_lane_has_the_one_before(is_away: bool) -> None:
    """Also where it is away: a replica with wrong weights must not take over from one that only restarts."""
    async with Cluster([VerifierScript()] * 2) as cluster:
        await cluster.all_there()
        await cluster.restart_verifier(1, **OTHER)
        await cluster.until(lambda: cluster.engine.counters.num_verifier_refusals > 0)
        where = "lane 0's verifier v0:1 has the one before"
        assert "weights_hash is 'others', but the first verifier's is 'weights'; all verifiers of" in cluster.engine.ready.reason
        assert f"another model now, restart the coordinator: {where}" in cluster.engine.ready.reason
        if is_away:
            await cluster.kill_verifier(0)
            await cluster.until(lambda: f"{where}, and may come back" in cluster.engine.ready.reason)
            assert not cluster.engine.ready.is_ready
            await cluster.restart_verifier(0)
            await cluster.until(lambda: cluster.engine.ready.is_ready)
        await cluster.submit(PROMPT, seed=1, max_tokens=20).check()
        await cluster.restart_verifier(0, **OTHER)  # a rolling change comes to its end
        await cluster.all_there()
        await asyncio.gather(*(cluster.submit(PROMPT, seed=seed, max_tokens=20).check() for seed in range(30)))
        assert min(verifier.num_rows for verifier in cluster.verifiers) > 0


async def test_drafters_must_match_the_new_one() -> None:
    scripts = [byte_verifier_script()], [byte_drafter_script(acceptance=0.7), byte_drafter_script(acceptance=0.7, max_message_bytes=200_000)]
    async with Cluster(*scripts, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        links = cluster.engine.lanes[0].links
        await cluster.restart_verifier(0, weights_hash="others", max_model_len=100_000, num_blocks=1 << 20)
        await cluster.until(lambda: [link.is_connected for link in links] == [True, False])
        assert "messages may have 200000" in links[1].reason
        await (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=60).check()
        assert cluster.engine.counters.num_accepted_tokens > 0
        await cluster.restart_verifier(0, weights_hash="third", max_model_len=512)
        await cluster.all_there()


async def test_what_was_learned_of_scores_is_of_one_model(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    async with adaptive_cluster([drafter(acceptance=0.7)], calibration_file=str(path)) as cluster:
        await cluster.all_there()
        await cluster.submit(PROMPT, seed=1, max_tokens=100).check()
        learned = cluster.engine._admission.calibration
        assert learned is not None
        assert learned.calibrator.trials.sum() > 0
        await cluster.restart_verifier(0, **OTHER)
        await cluster.until(lambda: cluster.engine._admission.calibration is not learned)
        await cluster.all_there()
        fresh = cluster.engine._admission.calibration
        assert fresh is not None
        assert fresh.calibrator.trials.sum() == 0
        await cluster.submit(PROMPT, seed=1, max_tokens=100).check()
        assert fresh.calibrator.trials.sum() > 0
    assert "others" in json.loads(path.read_text())["models"]


async def test_a_canary_ends_and_a_promoted_one_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with Cluster(drafters=[DrafterScript(acceptance=0.7)], k=4, min_draft_wait_ms=1000) as cluster:
        engine = (await cluster.all_there()).engine
        engine.set_canary(CanaryAction.START, 0.5, '{"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 16, 0]]}')
        await cluster.restart_verifier(0, **OTHER)
        await cluster.until(lambda: engine.variants.canary is None)
        assert "the canary ends" in caplog.text
        await (await cluster.all_there()).submit(PROMPT, seed=1, max_tokens=20).check()
        engine.set_canary(CanaryAction.START, 0.5, '{"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 16, 0]]}')
        engine.set_canary(CanaryAction.PROMOTE, 0, "")
        await cluster.restart_verifier(0, weights_hash="third", max_num_seqs=4)
        await cluster.until(lambda: engine.description is not None and engine.description.verifier.weights_hash == "third")
        await cluster.all_there()
        assert engine.description is not None
        assert engine.description.schedule == (0, 3, 3, 0, 0)
        assert [engine.lanes[0].schedule.choose(size, size) for size in range(1, 5)] == [3, 3, 0, 0]


async def test_clients_read_the_new_tokenizer(socket_dir: Path) -> None:
    """Text is encoded by clients: what was opened under the tokenizer before ends, so that each asks for the new one."""
    async with Cluster([byte_verifier_script()]) as cluster:
        await cluster.ready()
        server = CoordinatorServer(cluster.engine, CoordinatorConfig(listen=(f"unix:{socket_dir}/coordinator",)))
        await server.start()
        async with AsyncClient(server.bound_addresses[0]) as client:
            first = await client.generate("abc", max_tokens=5, seed=1)
            assert first.prompt_token_ids == [97, 98, 99]
            await cluster.restart_verifier(0, weights_hash="others", tokenizer=_shifted_spec())
            await cluster.until(lambda: not cluster.engine.ready.is_ready)
            await cluster.ready()
            second = await client.generate("abc", max_tokens=5, seed=1)
            assert second.prompt_token_ids == [98, 99, 97]
        await server.stop(0)


async def test_a_batch_that_has_begun_is_of_one_model() -> None:
    """What it has not submitted by then was encoded for the model before."""
    async with Cluster() as cluster:
        await cluster.ready()
        requests = [GenerateRequest(PROMPT, SamplingParams(seed=seed, max_tokens=5)) for seed in range(3)]
        batch = BatchStream(cluster.engine, requests, max_in_flight=1)
        cluster.engine.watch_model(lambda: batch.drain("another model"))
        updates = batch.updates()
        assert (await anext(updates)).error is None
        await cluster.restart_verifier(0, **OTHER)
        await cluster.until(lambda: not cluster.engine.ready.is_ready)
        await cluster.ready()
        rest = [update async for update in updates]
        assert [(result.index, result.error is not None and result.error.message) for result in rest] == [(1, "another model"), (2, "another model")]


def _shifted_spec() -> TokenizerSpec:
    """Another tokenizer: the ids of three letters are exchanged."""
    spec = make_spec()
    content = json.loads(spec.tokenizer_json)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"], vocab["c"] = vocab["b"], vocab["c"], vocab["a"]
    return dataclasses.replace(spec, tokenizer_json=json.dumps(content).encode(), fingerprint=fingerprint(content))
