"""What adaptive verification chooses in the coordinator's steps, what it falls back to, and what it learns and keeps."""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.status import describe_status
from specwire.messages import DraftCost, DraftOpen, VerifyCost, VerifyRound
from specwire.policy.adaptive import AdaptivePolicy, Kept
from specwire.policy.clock import StepClock
from tests.coordinator.adaptive_cluster import VERIFIER, K, adaptive_cluster, drafter, policy_of
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

LONG = replace(VERIFIER, max_model_len=4000, num_blocks=16_000)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what the tables say: the peers' work takes no time here, so that the clock would show the tests' own."""
    monkeypatch.setattr(StepClock, "committed", lambda *arguments: 0.0)


def long_drafter(acceptance: float = 1.0) -> DrafterScript:
    return drafter(max_model_len=4000, acceptance=acceptance)


def decode(cluster: Cluster, num_sequences: int = 4, **sampling: int) -> list[Running]:
    return [cluster.submit([5, 6, 7 + seed], seed=seed, max_tokens=3900, **sampling) for seed in range(num_sequences)]


def watch_k(cluster: Cluster) -> Callable[[], list[int]]:
    """Most drafts of a row by round, from now on."""
    rounds = cluster.verifiers[0].received
    rounds.clear()
    return lambda: [most_drafts(message) for message in rounds if any(not row.token_budget for row in message.rows)]


def most_drafts(message: VerifyRound) -> int:
    return max((len(row.draft_tokens) for row in message.rows), default=0)


async def steps(cluster: Cluster, number: int) -> None:
    until = cluster.num_steps + number
    await cluster.until(lambda: cluster.num_steps >= until)


def cancel(running: list[Running]) -> None:
    for request in running:
        request.handle.cancel()


@pytest.mark.usefixtures("untimed")
async def test_k_goes_to_0_where_drafts_are_bad_and_comes_back_when_they_are_good() -> None:
    async with adaptive_cluster([long_drafter(0.0)], [LONG]) as cluster:
        await cluster.all_there()
        running = decode(cluster)
        ks = watch_k(cluster)
        await cluster.until(lambda: len(ks()) > 30 and not any(ks()[-30:]))
        ks = watch_k(cluster)
        await steps(cluster, 900)
        assert 0 < sum(k > 0 for k in ks()) < 0.1 * len(ks()), "but for probes, it runs ahead"
        assert any(row.from_round for message in cluster.verifiers[0].received for row in message.rows)
        cluster.drafters[0].script.acceptance = 1.0
        before = cluster.num_steps
        await cluster.until(lambda: min(ks()[-30:]) == K)
        assert cluster.num_steps - before < 30 + 200, "it is found out by a few probes"
        status = describe_status(cluster.engine).lanes[0].policy
        assert status.is_adaptive
        assert status.num_probes > 0
        assert 0 < status.num_kept_tokens < status.num_offered_tokens
        cancel(running)


@pytest.mark.usefixtures("untimed")
async def test_a_probe_that_finds_all_drafters_catching_up_shows_nothing() -> None:
    """The next one does."""
    async with adaptive_cluster([long_drafter(0.0)], [LONG]) as cluster:
        await cluster.all_there()
        running = decode(cluster)
        ks = watch_k(cluster)
        await cluster.until(lambda: len(ks()) > 150 and not any(ks()[-30:]))
        script = cluster.drafters[0].script
        script.acceptance, script.num_catch_up_rounds = 1.0, 1 << 30
        await cluster.until(lambda: cluster.engine.counters.fallbacks["catching_up"] >= 4)
        script.num_catch_up_rounds = 0
        await cluster.until(lambda: min(ks()[-30:]) == K)
        cancel(running)


@pytest.mark.usefixtures("untimed")
async def test_only_good_drafts_are_kept() -> None:
    """Scores tell right drafts from wrong ones, and each token costs: after a while hardly a wrong one is verified."""
    steep = VerifyCost((1, 128), (4.0, 30.0))

    def score(is_right: bool, position: int) -> float:
        return 0.9 if is_right else 0.1

    async with adaptive_cluster([replace(long_drafter(0.5), score=score)], [replace(LONG, verify_cost=steep)]) as cluster:
        await cluster.all_there()
        running = decode(cluster, 8)
        await cluster.until(lambda: cluster.engine.counters.num_draft_tokens > 300)
        accepted, verified = (getattr(cluster.engine.counters, f"num_{what}_tokens") for what in ("accepted", "draft"))
        await cluster.until(lambda: cluster.engine.counters.num_draft_tokens > 600)
        accepted, verified = cluster.engine.counters.num_accepted_tokens - accepted, cluster.engine.counters.num_draft_tokens - verified
        assert accepted > 0.9 * verified
        cancel(running)


@pytest.mark.usefixtures("untimed")
async def test_where_all_drafts_pay_they_are_sent_before_they_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they turn bad, which their scores tell, and where each token costs they are judged first again."""
    steep = VerifyCost((1, 128), (4.0, 30.0))
    choose_kept = AdaptivePolicy.choose_kept
    sent: list[bool] = []

    def keep(self: AdaptivePolicy, *args: Any, is_sent: bool) -> Kept:
        sent.append(is_sent)
        kept = choose_kept(self, *args, is_sent=is_sent)
        assert not is_sent or (kept.num_kept == args[2]).all()
        return kept

    def score(is_right: bool, position: int) -> float:
        return 0.99 if is_right else 0.02

    monkeypatch.setattr(AdaptivePolicy, "choose_kept", keep)
    async with adaptive_cluster([replace(long_drafter(), score=score)], [replace(LONG, verify_cost=steep)]) as cluster:
        await cluster.all_there()
        running = decode(cluster, 8)
        await cluster.until(lambda: len(sent) > 100 and all(sent[-30:]))
        policy, counters = policy_of(cluster).policy, cluster.engine.counters
        trials, num_drafts, num_judged = policy.calibrator.trials.sum(), counters.num_draft_tokens, len(sent)
        await steps(cluster, 40)
        assert policy.calibrator.trials.sum() > trials, "it learns from them as from others"
        assert counters.num_draft_tokens - num_drafts >= (len(sent) - num_judged - 1) * 8 * K > 0, "all are verified"
        cluster.drafters[0].script.acceptance = 0.4
        await cluster.until(lambda: len(sent) > 200 and not any(sent[-5:]))
        cancel(running)


@pytest.mark.usefixtures("untimed")
async def test_sequences_are_asked_for_drafts_by_how_good_theirs_are() -> None:
    """Half of them have good drafts, half bad ones, and a draft costs for each sequence. Then it is the other way round."""
    first_good = 0

    def acceptance(opened: DraftOpen) -> float:
        return float(opened.token_ids[2] % 2 == first_good)

    def score(is_right: bool, position: int) -> float:
        return 0.9 if is_right else 0.1

    cost = tuple(DraftCost(k, n, 0.05 * k * n) for k in (1, 8) for n in (1, 16))
    script = replace(long_drafter(), acceptance=acceptance, score=score, draft_cost=cost)
    async with adaptive_cluster([script], [LONG]) as cluster:
        await cluster.all_there()
        running = decode(cluster, 12)

        def shares() -> tuple[float, float]:
            """Rows of the last 40 rounds that had drafts, of sequences of each kind."""
            rounds = [message for message in cluster.verifiers[0].received if not any(row.token_budget for row in message.rows)][-40:]
            kinds = {sequence.slot.index: sequence.token_ids[2] % 2 for sequence in cluster.engine.lanes[0].running if sequence.slot is not None}
            rows = [(kinds[row.slot], bool(row.draft_tokens)) for message in rounds for row in message.rows if row.slot in kinds]
            numbers = [[has for kind, has in rows if kind == which] for which in (0, 1)]
            return sum(numbers[0]) / max(1, len(numbers[0])), sum(numbers[1]) / max(1, len(numbers[1]))

        await steps(cluster, 40)
        await cluster.until(lambda: shares()[0] > 0.9 and shares()[1] < 0.1)
        asked = cluster.drafters[0].num_rows
        await steps(cluster, 64)
        assert cluster.drafters[0].num_rows - asked < 0.7 * 64 * 12, "half of them, and the others once in 32 steps"
        first_good = 1
        await cluster.until(lambda: shares()[0] < 0.1 and shares()[1] > 0.9)
        cancel(running)


@pytest.mark.usefixtures("untimed")
async def test_prefills_beside_steady_decodes_do_not_thrash() -> None:
    """Four sequences decode, and a prompt of one chunk comes every other step."""
    async with adaptive_cluster([long_drafter(0.8)], [LONG]) as cluster:
        await cluster.all_there()
        running = decode(cluster)
        await steps(cluster, 60)
        ks = watch_k(cluster)
        for seed in range(60):
            await cluster.submit([20 + seed] * 30, seed=seed, max_tokens=1).check()
            await steps(cluster, 2)
        chosen = ks()
        assert sum((k == 0) != (other == 0) for k, other in itertools.pairwise(chosen)) <= 0.1 * len(chosen)
        cancel(running)


@pytest.mark.parametrize("missing", ["verifier", "drafter"])
async def test_without_costs_k_is_fixed_and_that_is_said_once(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    verifier = replace(LONG, verify_cost=VerifyCost()) if missing == "verifier" else LONG
    async with adaptive_cluster([long_drafter(0.0) if missing == "verifier" else DrafterScript(acceptance=0.0)], [verifier]) as cluster:
        await cluster.all_there()
        ks = watch_k(cluster)
        await cluster.submit([5, 6, 7], seed=1, max_tokens=12).check()
        assert ks()[0] == K, "short ones, too: it is not said that anything is chosen"
        running = decode(cluster)
        await steps(cluster, 30)
        ks = watch_k(cluster)
        await steps(cluster, 30)
        assert set(ks()) == {K}
        said = [record.message for record in caplog.records if "K is fixed" in record.message]
        assert len(said) == 1
        assert missing in said[0]
        lane = describe_status(cluster.engine).lanes[0]
        assert missing in lane.policy.fallback
        assert lane.policy.num_fixed_steps > 20
        cancel(running)


async def test_the_ratio_test_is_refused() -> None:
    """What it emits depends on which drafts are verified, and here their scores decide that."""
    script = replace(VERIFIER, rejection_sample_method="probabilistic")
    async with adaptive_cluster(verifiers=[script]) as cluster:
        while "rejection_sample_method" not in cluster.engine.ready.reason:
            await cluster.engine.readiness_changed()
        assert not cluster.engine.ready.is_ready
        assert "use strict there, or leave enable_adaptive_verification out" in cluster.engine.ready.reason
    async with Cluster([script], [drafter()]) as cluster:
        await cluster.ready()


async def test_what_steps_take_is_learned() -> None:
    """The verifier's table says 4 ms where a round takes a tenth of it, on a machine that is not busy, and the other way round for the drafter."""
    async with adaptive_cluster(
        [replace(long_drafter(), tells_times=True, delay_s=0.003)], [replace(LONG, tells_times=True, delay_s=0.0004)]
    ) as cluster:  # fmt: skip
        await cluster.all_there()
        running = decode(cluster)
        await steps(cluster, 250)
        cost, curve = policy_of(cluster).cost, cluster.engine.lanes[0].links[0].drafter.curve
        assert abs(cost.verify.correction.factor - 1) > 0.01
        assert len(cost.verify.correction.errors) > 30
        assert curve.correction.factor > 1.1
        assert len(cost.clock.errors) > 30
        metrics = cluster.engine.metrics.lanes["v0:1"]
        assert metrics.predicted_step.count == metrics.measured_step.count > 30
        assert metrics.budget.count > 30
        cancel(running)


async def test_calibration_outlives_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "calibration.json"

    async def run(verifier: VerifierScript) -> float:
        """Observations that there are at the start."""
        async with adaptive_cluster([long_drafter(0.7)], [verifier], calibration_file=str(file)) as cluster:
            await cluster.all_there()
            found = float(policy_of(cluster).policy.calibrator.trials.sum())
            await cluster.submit([5, 6, 7], seed=1, max_tokens=200, temperature=0.0).check()
            return found

    assert await run(LONG) == 0
    assert [group["method"] for group in json.loads(file.read_text())["groups"]] == ["scripted scripted-draft"] * 2
    assert await run(LONG) > 50
    assert await run(replace(LONG, weights_hash="others")) == 0
    assert "calibration starts afresh" in caplog.text


async def test_status_shows_the_choices(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with adaptive_cluster([long_drafter(0.7)], [LONG], schedule=[[1, 2, 9], [5, 16, 0]]) as cluster:
        await cluster.all_there()
        running = decode(cluster, 2)
        await steps(cluster, 60)
        cluster.engine._admission.calibration.look()  # type: ignore[union-attr]
        status = describe_status(cluster.engine)
        settings = {setting.key: setting for setting in status.speculation}
        assert json.loads(settings["enable_adaptive_verification"].value) is True
        schedule = settings["num_speculative_tokens_per_batch_size"]
        assert json.loads(schedule.value) == [[1, 4, K], [5, 16, 0]]
        assert any("clipped" in reason for reason in schedule.reasons)
        assert any("3 to 4" in reason for reason in schedule.reasons)
        [kind] = status.calibration
        assert kind.method == "scripted scripted-draft"
        assert kind.acceptance_by_position[0] == pytest.approx(0.7, abs=0.2)
        assert "speculation: " in caplog.text
        cancel(running)
        await asyncio.sleep(0)
