"""How the GPU benchmark of policies sets rates, drafts, switches and judges; the whole of it runs in test_gpu_scripts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import pareto_picture
from benchmarks.gpu.block_drafter import BlockPass, Synthetic
from benchmarks.gpu.engine_models import TINY
from benchmarks.gpu.known_rates import KnownRate, KnownRates, make_request
from benchmarks.gpu.pareto_bars import BARS, compares_fixed, evaluate, evaluate_rollout
from benchmarks.gpu.pareto_cells import FULL, MIXES, Points, Policy, known_rates
from benchmarks.gpu.rollout import k_over_time, rollout_lengths
from benchmarks.gpu.switching import Switch, switch_policy
from benchmarks.gpu.window import Window
from drafter_svc.method import Ask
from specwire.advise.steps import StepPoint
from specwire.engine.graphs.tensors import RoundLimits
from specwire.messages import CoordinatorStatus, DraftCost, DraftOpen, LaneStatus, VerifyCost
from specwire.policy.cost import StepCost
from specwire.sampling_params import SamplingParams
from specwire.speculative_acceptance import check_rates
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript


@pytest.mark.parametrize("known", [KnownRate(0.8, 0.5), KnownRate(0.3, 0.0), KnownRate(0.9, 0.9)])
@pytest.mark.parametrize("number", [0, 7, 900_255])
def test_a_seed_says_the_rate(known: KnownRate, number: int) -> None:
    assert KnownRate.of(known.seed(number)) == known
    request = make_request([1, 2], number, known, 7, 5)
    assert request.sampling.seed == known.seed(number)
    assert request.synthetic_acceptance_rates[:2] == pytest.approx((known.rate, known.rate**2))
    check_rates(request.synthetic_acceptance_rates, 7)


def test_any_other_seed_has_a_rate() -> None:
    assert all(0 < KnownRate.of(seed).rate < 1 for seed in (0, 100, 2**64 - 1))


def make_method(max_num_seqs: int = 8, most: int = 3) -> Synthetic:
    torch.manual_seed(0)
    block = BlockPass(TINY, RoundLimits(max_num_seqs, most, max_num_seqs * (most + 1), 1), torch.device("cpu"))
    return Synthetic(block, max_num_drafts=most, max_num_seqs=max_num_seqs, max_model_len=40, vocab_size=TINY.vocab_size, device="cpu")


def opened(method: Any, seq_ids: dict[int, KnownRate], num_tokens: int = 2) -> None:
    for seq_id, known in seq_ids.items():
        method.open(seq_id, DraftOpen(seq_id, 0, [5 + seq_id] * num_tokens, num_tokens, SamplingParams(), known.seed(seq_id)))


def test_block_drafts_for_every_ask() -> None:
    method = make_method()
    opened(method, dict.fromkeys(range(4), KnownRate(0.5, 0.0)))
    answers = method.propose([Ask(0, 3), Ask(1, 0), Ask(2, 1), Ask(3, 9)])
    assert [len(answer.token_ids) for answer in answers] == [3, 0, 1, 3]
    assert all(0 <= token < TINY.vocab_size for answer in answers for token in answer.token_ids)
    assert method.counts.num_tokens == 4 + 2 + 4

    # A draft depends on the sequence's last token, and not on what is drafted beside it.
    [alone] = method.propose([Ask(3, 3)])
    assert method.propose([Ask(3, 3)]) == [alone]
    method.append(3, [7])
    [other] = method.propose([Ask(3, 3)])
    assert other.token_ids != alone.token_ids


def test_block_never_drafts_past_the_context() -> None:
    method = make_method()
    opened(method, {0: KnownRate(0.5, 0.0), 1: KnownRate(0.5, 0.0)}, num_tokens=38)
    method.append(1, [4, 4])
    assert [len(answer.token_ids) for answer in method.propose([Ask(0, 3), Ask(1, 3)])] == [2, 0]
    method.close(0)
    assert method.propose([]) == []


def test_scores_are_the_true_rates_behind_noise() -> None:
    method = KnownRates(make_method(max_num_seqs=3))
    opened(method, {0: KnownRate(0.8, 0.0), 1: KnownRate(0.9, 0.5), 2: KnownRate(0.3, 0.5)})
    answers = [method.propose([Ask(0, 3), Ask(1, 2), Ask(2, 3)]) for _ in range(400)]
    assert all(answer[0].scores == pytest.approx([0.8] * 3) for answer in answers)
    for index, rate, number in ((1, 0.9, 2), (2, 0.3, 3)):
        scores = np.array([answer[index].scores for answer in answers])
        log_odds = np.log(scores / (1 - scores)) - np.log(rate / (1 - rate))
        assert scores.shape == (400, number)
        assert abs(log_odds.mean()) < 0.1
        assert 0.45 < log_odds.std() < 0.55
        assert np.abs(np.corrcoef(log_odds.T)[0, 1]) < 0.2  # each draft has noise of its own


def test_mixes_take_turns() -> None:
    assert [known.rate for known in known_rates("mixed", 0.5, 4)] == [0.9, 0.3, 0.9, 0.3]
    assert {known.rate for known in known_rates("uniform", 0.0, 4)} == set(MIXES["uniform"])


async def test_policies_switch_between_batches(tmp_path: Path) -> None:
    """The same coordinator, verifier and drafter: no drafts, two a step, by adaptive verification, none again."""
    async with Cluster(drafters=[DrafterScript()], k=3, adaptive=True) as cluster:
        await cluster.all_there()
        [lane] = cluster.engine.lanes
        learned = lane.policy
        assert learned is not None
        switch, path = Switch(cluster.engine), str(tmp_path / "switch")
        await switch.listen(path)
        most: list[int] = []
        for k, is_adaptive in ((0, False), (2, False), (3, True), (0, False)):
            await switch_policy(path, Policy.fixed(k, 4).schedule, is_adaptive=is_adaptive)
            assert lane.policy is (learned if is_adaptive else None)
            running = cluster.submit([1, 2, 3], max_tokens=20, seed=1)
            await running.check()
            stats = running.sink.choices[0].spec_stats
            assert stats is not None
            most.append(stats.num_draft_tokens)
        running = cluster.submit([1, 2, 3], max_tokens=200)
        await cluster.until(lambda: bool(lane.running))
        with pytest.raises(AssertionError, match="while lane 0 runs 1 sequences"):
            switch.set(((1, 4, 1),), is_adaptive=False)
        running.handle.cancel()
        assert switch.server is not None
        switch.server.close()
    assert most[0] == most[3] == 0 < most[1]


def status(num_generated: int, num_accepted: int, num_drafts: int, num_running: int = 1) -> CoordinatorStatus:
    lanes = (LaneStatus(0, "unix:v", num_running=num_running),)
    return CoordinatorStatus(
        "1", 1.0, True, num_generated_tokens=num_generated, num_accepted_tokens=num_accepted, num_draft_tokens=num_drafts, lanes=lanes
    )


def test_a_window_counts_what_grew() -> None:
    """4 sequences, 100 steps of each in 2 s, 3 drafts a step of which 1.5 are accepted."""
    window = Window(4, 1000, 2.0, 16.0, status(50, 5, 30), status(1050, 605, 1230))
    assert window.tok_s == 500
    assert window.tokens_per_step == pytest.approx(2.5)
    assert window.step_ms == pytest.approx(20.0)
    assert window.drafts_per_step == pytest.approx(3.0)
    assert window.acceptance == pytest.approx(0.5)
    assert Window(4, 400, 2.0, 16.0, status(50, 5, 30), status(450, 5, 30)).acceptance is None
    with pytest.raises(AssertionError, match="reads far behind"):
        _ = Window(4, 400, 2.0, 16.0, status(50, 5, 30), status(50, 5, 30)).step_ms


def test_k_over_time_leaves_out_spans_without_tokens() -> None:
    points = k_over_time([(0.0, status(0, 0, 0, 4)), (0.1, status(20, 10, 30, 4)), (0.2, status(20, 10, 30, 4)), (0.3, status(25, 10, 30, 2))])
    assert points == [{"seconds": 0.1, "k": 3.0, "num_running": 4.0}, {"seconds": 0.3, "k": 0.0, "num_running": 2.0}]


def test_rollouts_have_a_long_tail() -> None:
    lengths = rollout_lengths(FULL, 256)
    assert lengths == rollout_lengths(FULL, 256)
    assert 0.8 * FULL.median_length < np.median(lengths) < 1.2 * FULL.median_length
    assert max(lengths) == FULL.longest > 4 * FULL.median_length
    assert FULL.longest <= FULL.sizes.num_steps


def test_advised_schedule_follows_measured_steps() -> None:
    """Steps of a batch of 64 that take twice as long with drafts: none there, many for one sequence."""
    verify = VerifyCost(num_tokens=(1, 64, 512), step_ms=(5.0, 6.0, 20.0), max_graph_tokens=512)
    cost = StepCost.from_tables(verify, [DraftCost(k, count, 0.5) for k in (1, 7) for count in (1, 64)])
    points = Points({(1, 0): StepPoint(1, 0, 0.0, 0.0, 5.0, 500), (64, 0): StepPoint(64, 0, 0.0, 0.0, 6.0, 500)})
    for k in (3, 7):
        points.by_shape |= {(1, k): StepPoint(1, k, 1.0, float(k), 6.0, 500), (64, k): StepPoint(64, k, 1.0, float(k), 60.0, 500)}
    schedule = points.advise(cost, MIXES["uniform"], 64, 500)
    assert schedule[0][2] == 7
    assert schedule[-1][1:] == (64, 0)


def row(policy: str, count: int, tok_s: float, *, sigma: float = 0.5, error: float | None = None) -> dict[str, Any]:
    return {
        "policy": policy, "c": count, "sigma": sigma, "tok_s": tok_s, "user_tok_s": tok_s / count, "prediction_error": error,
    }  # fmt: skip


def test_bars() -> None:
    rows = [row("none", 64, 1000), row("K=3", 64, 1500), row("K=7", 64, 1400), row("dynamic", 64, 9000), row("adaptive", 64, 9000, sigma=0.0)]
    rows += [row("adaptive", 64, 1700, error=0.04), row("none", 16, 500), row("K=3", 16, 900), row("adaptive", 16, 480, error=0.08)]
    found = {(bar["bar"], bar.get("c")): bar for bar in evaluate("block-mixed", rows, 0.5)}
    assert found.keys() == {("adaptive / none", 16), ("adaptive / none", 64), ("adaptive / best fixed K", 64), ("median prediction error", None)}
    best = found["adaptive / best fixed K", 64]
    assert best["beside"] == "K=3"
    assert best["value"] == pytest.approx(1700 / 1500)
    assert not best["is_met"]  # 1.15
    assert found["adaptive / none", 64]["is_met"]
    assert not found["adaptive / none", 16]["is_met"]
    assert found["median prediction error", None]["value"] == pytest.approx(0.06)
    assert not found["median prediction error", None]["is_met"]


def test_bars_ask_for_what_they_compare() -> None:
    assert compares_fixed("block-mixed", 64)
    assert not compares_fixed("block-mixed", 32)
    assert all(compares_fixed(name, 1) for name in BARS if name != "block-mixed")


def test_rollout_bars() -> None:
    none, fixed = evaluate_rollout({"none": 10.0, "K=1": 8.0, "K=5": 5.0, "dynamic": 1.0, "adaptive": 5.2})
    assert (none["value"], none["is_met"]) == (pytest.approx(0.52), True)
    assert (fixed["beside"], fixed["value"], fixed["is_met"]) == ("K=5", pytest.approx(1.04), False)


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no complete results"):
        pareto_picture.main([str(tmp_path)])
    rows = [row(policy, count, 100.0 * count) for policy in ("none", "K=3", "adaptive") for count in (1, 64)]
    (tmp_path / "pareto-block-mixed.json").write_text(json.dumps({"is_complete": True, "rows": [*rows, row("adaptive", 1, 5.0, sigma=0.0)]}))
    (tmp_path / "pareto-model-mixed.json").write_text(json.dumps({"is_complete": False, "rows": []}))
    points = [{"seconds": 0.1, "k": 1.0, "num_running": 4.0}, {"seconds": 0.2, "k": 7.0, "num_running": 1.0}]
    rollout = [
        {"policy": "none", "num_sequences": 4, "seconds": 2.0},
        {"policy": "adaptive", "num_sequences": 4, "seconds": 1.0, "k_over_time": points},
    ]
    (tmp_path / "pareto-rollout.json").write_text(json.dumps({"is_complete": True, "rows": rollout}))
    pareto_picture.main([str(tmp_path)])
    for name in ("pareto.png", "rollout.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert name in capsys.readouterr().out or name == "rollout.png"
