"""Steps 3 to 5: what follows from the figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specwire.advise.advice import Advice, make_advice
from specwire.advise.configuration import canary_file, config_file, drafter_keys, plan_canary, speculative_keys
from specwire.advise.online import OnlineRate, OnlineRun
from specwire.advise.options import Thresholds
from specwire.advise.verdict import Decision, Expected, Verdict, decide, stop_early
from specwire.config import CoordinatorConfig
from specwire.config_file import read_config_file
from specwire.config_layers import resolve
from specwire.messages import CoordinatorStatus, SettingStatus
from tests.advise.test_advice import measured, speculative

USUAL = Thresholds()
PAYS, LOSES = Expected(1.0, 4.0), Expected(-0.5, 4.0)


def rate(name: str, saved: float, more: float = 0.0, *, spread: float = 0.0, k: int = 4) -> OnlineRate:
    """Three pairs, of which the middle one saves so much of a token's time and serves so much more."""
    plain = OnlineRun(10.0, 50.0, 100.0, (9.0, 10.0, 11.0))
    pairs = [(plain, OnlineRun(10 * (1 - saved - off), 50.0, 100 * (1 + more), (5.0, 6.0, 7.0))) for off in (-spread / 2, 0.0, spread / 2)]
    return OnlineRate(name, 2.0 if name == "low" else 12.0, 20, k, tuple(pairs))


def advice(*, falls: bool = True, adaptive: bool = False) -> Advice:
    found = make_advice(measured(), 0.02, 7)
    schedule = ((1, 8, 5), (9, 64, 1)) if falls else ((1, 64, 5),)
    return replace(found, schedule=schedule, use_adaptive=adaptive)


@pytest.mark.parametrize(
    ("low", "high", "falls", "adaptive", "expected"),
    [
        ((0.4, 0.0), (0.35, 0.3), True, False, Verdict.ON),
        ((0.3, 0.0), (0.0, 0.0), True, False, Verdict.ON),
        ((0.31, 0.0), (-0.019, -0.019), True, False, Verdict.ON),
        ((0.29, 0.0), (0.2, 0.1), True, False, Verdict.WEIGH),
        ((0.0, 0.0), (0.1, 0.2), True, False, Verdict.WEIGH),
        ((0.4, 0.0), (-0.1, 0.0), True, False, Verdict.DYNAMIC),
        ((0.4, 0.0), (0.1, -0.1), True, False, Verdict.DYNAMIC),
        ((0.1, 0.0), (-0.1, -0.2), True, True, Verdict.ADAPTIVE),
        ((0.4, 0.0), (-0.1, -0.2), False, False, Verdict.ADAPTIVE),
        ((0.01, 0.0), (-0.3, -0.2), True, False, Verdict.OFF),
        ((0.01, 0.0), (0.01, 0.019), True, False, Verdict.OFF),
    ],
)
def test_verdicts(low: tuple[float, float], high: tuple[float, float], falls: bool, adaptive: bool, expected: Verdict) -> None:
    decision = decide(advice(falls=falls, adaptive=adaptive), rate("low", *low), rate("high", *high), USUAL, PAYS, PAYS)
    assert decision.verdict is expected
    assert decision.verdict.is_off == (expected is Verdict.OFF)
    assert f"{low[0]:.1%}" in decision.headline
    assert decision.num_speculative_tokens == 4


def test_the_words_say_which_way_each_rate_went() -> None:
    low, high = rate("low", -0.2), rate("high", 0.4, 0.1)
    reason = decide(advice(), low, high, USUAL, PAYS, PAYS).reasons[0]
    assert "drafts cost 20.0% of a token's time at the low rate" in reason
    assert "and save 40.0% at the high one, with +10.0% tokens/s" in reason
    assert "12.00 ms instead of 10.00 ms, 20.0% more in the median pair" in low.sentence()
    assert "6.00 ms instead of 10.00 ms, 40.0% less in the median pair" in high.sentence()
    plan = plan_canary({"num_speculative_tokens": 4}, 2.0, low, high, USUAL)
    assert plan is not None
    assert "(measured here: 20.0% more at the low rate, 40.0% less at the high one;" in plan.guards[2]


def test_thresholds_are_options() -> None:
    def verdict(**changes: float) -> Verdict:
        return decide(advice(), rate("low", 0.2), rate("high", -0.05), replace(USUAL, **changes), PAYS, PAYS).verdict  # type: ignore[arg-type]

    assert verdict(max_loss=0.1) is Verdict.WEIGH
    assert verdict(max_loss=0.1, min_tpot_gain=0.15) is Verdict.ON
    assert verdict(min_gain=0.25) is Verdict.OFF


def test_what_noise_could_decide_the_steps_decide() -> None:
    noisy, high = rate("low", 0.31, spread=0.2), rate("high", 0.25, spread=0.01)
    for expected, counts, verdict in (
        (PAYS, "+41.0%", Verdict.ON),
        (Expected(0.6, 4.0), "+37.5%", Verdict.ON),
        (Expected(0.3, 4.0), "+23.1%", Verdict.WEIGH),
        (LOSES, "+21.0%", Verdict.WEIGH),  # that it does not pay at all is not within the noise
    ):
        decision = decide(advice(), noisy, high, USUAL, expected, PAYS)
        assert decision.verdict is verdict
        [doubt] = decision.doubts
        assert "+31.0% is nearer to +30% than the pairs of runs are apart (20%)" in doubt
        assert f"so that {counts} counts" in doubt
    assert decide(advice(), rate("low", 0.6, spread=0.2), high, USUAL, LOSES, LOSES).doubts == ()
    worse = rate("high", 0.0, spread=0.4)
    assert decide(advice(), rate("low", 0.6), worse, USUAL, PAYS, LOSES).verdict is Verdict.DYNAMIC
    assert decide(advice(), rate("low", 0.6), worse, USUAL, PAYS, PAYS).verdict is Verdict.ON


def test_no_more_is_saved_than_drafts_can() -> None:
    """1.1 tokens a step save a tenth of a token's time at most, however fast the runs with drafts were."""
    decision = decide(advice(), rate("low", 0.6), rate("high", 0.5), USUAL, Expected(0.05, 1.1), PAYS)
    assert decision.verdict is Verdict.WEIGH
    assert "drafts save 9.1% of a token's time" in decision.headline
    assert "is more than 1.10 tokens a step can bring" in decision.doubts[0]


def test_one_pair_says_nothing_of_noise() -> None:
    one = replace(rate("low", 0.6), pairs=rate("low", 0.6).pairs[:1])
    assert "one pair of runs" in decide(advice(), one, rate("high", 0.6), USUAL, PAYS, PAYS).doubts[0]
    assert "one pair" in one.sentence()


def test_acceptance_that_is_too_low_stops() -> None:
    stopped = stop_early(1.4, 10, USUAL)
    assert stopped is not None
    assert stopped.verdict is Verdict.STOPPED
    assert stopped.headline == (
        "leave speculation off: the mean acceptance length is 1.40, and --min-acceptance-length is 1.5 (--keep-going measures on nevertheless)"
    )
    assert stop_early(1.5, 10, USUAL) is None
    assert stop_early(1.4, 10, replace(USUAL, keep_going=True)) is None
    assert stop_early(1.4, 10, replace(USUAL, min_acceptance_length=1.3)) is None
    nothing = stop_early(1.0, 0, replace(USUAL, keep_going=True))
    assert nothing is not None
    assert "offered nothing" in nothing.headline


@pytest.mark.parametrize("verdict", [Verdict.ON, Verdict.WEIGH, Verdict.DYNAMIC, Verdict.ADAPTIVE])
def test_the_canary(verdict: Verdict, tmp_path: Path) -> None:
    keys = speculative_keys(Decision(verdict, 4, ("said",)), advice(), 7)
    plan = plan_canary(keys, 3.0, rate("low", 0.4), rate("high", 0.1), USUAL)
    assert plan is not None
    assert (plan.percents, plan.min_requests) == ((10.0, 50.0), 100)
    assert any("below 2.60" in guard for guard in plan.guards)
    content = canary_file({"method": "ngram"} | keys, plan, ["said"])
    base = speculative(content, tmp_path)
    assert base.num_speculative_tokens_per_batch_size == ((1, 1, 0),)
    assert base.num_speculative_tokens == speculative(config_file(keys, []), tmp_path).num_speculative_tokens
    (tmp_path / "canary.yaml").write_text(content)
    coordinator = resolve(CoordinatorConfig, "coordinator", [read_config_file(tmp_path / "canary.yaml")]).config
    assert coordinator.canary_share == pytest.approx(0.1)
    tried = json.loads(coordinator.canary_config)
    assert tried.get("enable_adaptive_verification", False) is (verdict is Verdict.ADAPTIVE)
    expected = {Verdict.DYNAMIC: [[1, 8, 5], [9, 64, 1]], Verdict.ADAPTIVE: [[1, 1, 7]]}.get(verdict, [[1, 1, 4]])
    assert tried["num_speculative_tokens_per_batch_size"] == expected


def test_requests_that_differ_need_more_of_them() -> None:
    wild = rate("low", 0.1)
    wild = replace(wild, pairs=tuple((plain, replace(drafted, tpots_ms=(1.0, 5.0, 20.0))) for plain, drafted in wild.pairs))
    plan = plan_canary({"num_speculative_tokens": 4}, 3.0, wild, rate("high", 0.05), replace(USUAL, canary_percent=80.0))
    assert plan is not None
    assert plan.min_requests > 1000
    assert plan.percents == (80.0,)
    assert plan_canary({"method": None}, 3.0, wild, wild, USUAL) is None


def test_the_drafters_configuration_goes_along() -> None:
    values = {"method": ["ngram", "suffix"], "prompt_lookup_max": 6, "prompt_lookup_min": 2, "num_speculative_tokens": 7, "calibration_file": "x"}
    status = CoordinatorStatus("1", 0.0, True, speculation=tuple(SettingStatus(key, json.dumps(value)) for key, value in values.items()))
    assert drafter_keys(status) == {"method": ["ngram", "suffix"], "prompt_lookup_max": 6}
