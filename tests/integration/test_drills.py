"""benchmarks.drills with few disturbances and no limits on time: whatever happens to services, answers are the target's and clients see no errors."""

from pathlib import Path

import pytest

from benchmarks import drills_drafter, drills_models
from benchmarks.drills_drafter import FAULTS, Pause, Plan, describe_pauses
from benchmarks.drills_load import Answer, Case, Load
from specwire.client import AsyncClient
from specwire.sampling_params import SamplingParams

PLAN = Plan(
    {"kill": 3, "hang": 2, "delay": 1, "internal": 1, "wrong": 10}, num_streams=8, step_s=0.01, quiet_s=0.2, hold_s=0.0, delay_s=1.0, apart_s=0.0,
    settle_s=0.0, restart_s=0.0,
)  # fmt: skip


async def test_a_drafter_that_dies_hangs_is_late_fails_or_lies(socket_dir: Path) -> None:
    async with drills_drafter.start_stack(socket_dir, PLAN) as stack:
        quiet, problems = await drills_drafter.run_quiet(stack, PLAN)
        assert problems == []
        fallbacks = {}
        for kind in PLAN.counts:
            if kind == FAULTS[0]:
                await stack.drafter.replace(drills_drafter.faulty_drafter(stack.drafter.address, ",".join(FAULTS), PLAN))
            figures, problems = await drills_drafter.run_drill(stack, PLAN, kind, quiet["step_p99_ms"])
            assert problems == []
            assert figures["disturbances"] == PLAN.counts[kind]
            assert figures["accepted_draft_tokens"] > 0
            assert (figures["different_answers"], figures["client_errors"]) == (0, 0)
            fallbacks[kind] = figures["fallbacks"]
        # What was done to the drafter did reach the coordinator.
        assert fallbacks["kill"]["drafter_lost"] >= 3 * 8
        assert fallbacks["hang"]["drafter_timeout"] > 0
        assert fallbacks["delay"]["drafter_timeout"] > 0
        assert fallbacks["internal"]["drafter_lost"] > 0
        assert fallbacks["wrong"]["garbage"] > 0


@pytest.mark.timeout(300)  # up to six processes start one after the other, four of them with torch
@pytest.mark.parametrize("methods", [("suffix",), pytest.param(("close", "far", "suffix"), marks=pytest.mark.slow)], ids=len)
async def test_drafters_are_swapped_and_verifier_and_coordinator_are_killed(socket_dir: Path, tmp_path: Path, methods: tuple[str, ...]) -> None:
    models = drills_models.Models(tmp_path, num_cases=6, answer_len=90)
    async with drills_models.start_stack(models, socket_dir, num_streams=4, max_num_seqs=3, restart_s=0.0) as stack:
        figures, problems = await drills_models.swap_drafters(stack, models, methods, num_tokens=40)
        assert problems == []
        phases = figures["phases"]
        names = {"close": "draft_model", "far": "draft_model"}
        assert [phase["method"] for phase in phases] == ["ngram", *(names.get(method, method) for method in methods)]
        assert all(0 < phase["accepted_tokens"] <= phase["draft_tokens"] for phase in phases)
        if "far" in methods:
            assert phases[1]["acceptance"] > phases[2]["acceptance"]

        figures, problems = await drills_models.restart_verifier(stack, models, 1)
        assert problems == []
        assert (await stack.client.get_status()).sequences_by_reason.get("error", 0) == 0

        figures, problems = await drills_models.hand_on_verifier(stack, models, 1)
        assert problems == []


def test_pauses_that_are_too_long_are_noticed() -> None:
    in_time = [Pause(gap_ms=90.0, wait_ms=5.0)] * 20
    figures = describe_pauses(in_time, step_p99_ms=40.0)
    assert (figures["is_in_time"], figures["excess_max_ms"], figures["gap_p50_ms"]) == (True, -5.0, 90.0)
    # A longer wait of the coordinator allows a longer pause, and one late pause of twenty is too many.
    assert describe_pauses([*in_time, Pause(gap_ms=140.0, wait_ms=60.0)], step_p99_ms=40.0)["is_in_time"]
    assert not describe_pauses([*in_time, Pause(gap_ms=140.0, wait_ms=5.0)], step_p99_ms=40.0)["is_in_time"]


def test_wrong_tokens_and_errors_are_noticed() -> None:
    case = Case([1], SamplingParams(), lambda: [5, 6, 7])
    load = Load(AsyncClient("127.0.0.1:1"), lambda stream, number: case, 1)
    load.answers = [Answer(case, [5, 6]), Answer(case, [5, 6, 7], is_whole=True), Answer(case, error="UnavailableError")]
    assert load.find_problems(allowed_error="UnavailableError") == []
    load.answers += [Answer(case, [5, 6], is_whole=True), Answer(case, [5, 7]), Answer(case, error="InternalError", error_text="why")]
    assert load.find_problems() == [
        "request 2 failed with UnavailableError: ",
        "request 3 has other tokens than the target alone gives, within 2",
        "request 4 has other tokens than the target alone gives, within 2",
        "request 5 failed with InternalError: why",
    ]
    load.gaps = [(0.0, 1.0), (1.0, 4.0), (4.0, 4.5)]
    assert [load.longest_gap_s(0.5, 0.9), load.longest_gap_s(0.5, 1.5), load.longest_gap_s(4.0, 5.0)] == [1.0, 3.0, 0.5]
