"""Step 5: the configuration that the decision comes to, and the canary that tries it first. Pure."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specwire.advise.advice import Advice
from specwire.advise.online import OnlineRate, in_words
from specwire.advise.options import Thresholds
from specwire.advise.verdict import Decision, Verdict
from specwire.messages import CoordinatorStatus
from specwire.speculative_config import SpeculativeConfig

_K, _SCHEDULE, _ADAPTIVE = "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"
_MIN_REQUESTS, _MAX_REQUESTS = 100, 100_000
_MAX_SHARE = 50.0
_TWO_SIGMA = 1.96


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """How to try it.

    Args:
        config: what the canary has that the base, which drafts nothing, has not.
        percents: of the requests, one after the other; then it is promoted.
        min_requests: of the canary before each look: so many that a mean over them tells half of the expected gain from noise.
        steps, guards: in words: what to do, and when to roll back.
    """

    config: Mapping[str, Any]
    percents: tuple[float, ...]
    min_requests: int
    steps: tuple[str, ...]
    guards: tuple[str, ...]


def drafter_keys(status: CoordinatorStatus) -> dict[str, Any]:
    """What a coordinator's configuration says of its drafters: the method, and all keys but those about K that are not the default."""
    known = {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}
    keys: dict[str, Any] = {}
    for setting in status.speculation:
        if setting.key in known and setting.key not in (_K, _SCHEDULE, _ADAPTIVE):
            value = json.loads(setting.value)
            if setting.key == "method" or value != known[setting.key]:
                keys[setting.key] = value
    return keys


def speculative_keys(decision: Decision, advice: Advice | None, most: int) -> dict[str, Any]:
    """The keys about K that follow the decision.

    Args:
        most: the largest K that was measured.
    """
    if decision.verdict.is_off or advice is None:
        return {"method": None}
    if decision.verdict is Verdict.ADAPTIVE:
        return {_K: most, _ADAPTIVE: True}
    if decision.verdict is Verdict.DYNAMIC:
        return {_K: max(k for _, _, k in advice.schedule), _SCHEDULE: [list(entry) for entry in advice.schedule]}
    return {_K: decision.num_speculative_tokens}


def plan_canary(keys: Mapping[str, Any], acceptance_length: float, low: OnlineRate, high: OnlineRate, thresholds: Thresholds) -> CanaryPlan | None:
    """How to try these keys beside plain decoding; None where nothing is drafted."""
    if _K not in keys:
        return None
    config: dict[str, Any] = {_SCHEDULE: keys.get(_SCHEDULE) or [[1, 1, keys[_K]]]}
    if keys.get(_ADAPTIVE):
        config[_ADAPTIVE] = True
    first = thresholds.canary_percent
    percents = (first, *((_MAX_SHARE,) if first < _MAX_SHARE else ()))
    gain = max(low.tpot_gain, high.tpot_gain, thresholds.min_gain, 0.01)
    wanted = 2 * (_TWO_SIGMA * low.spread_of_requests() / (gain / 2)) ** 2
    min_requests = min(_MAX_REQUESTS, max(_MIN_REQUESTS, math.ceil(wanted)))
    steps = [f"start with canary.yaml: {first:g}% of the requests have drafts, all others have none"]
    for percent in percents[1:]:
        steps.append(f"after {min_requests} requests of the canary: `specwire canary status`, and `specwire canary share {percent:g}`")
    steps.append(f"after {min_requests} more: `specwire canary promote`, and specwire.yaml in the place of canary.yaml for the next start")
    guards = (
        "more of the canary's sequences fail than of the base's",
        f"its acceptance length is below {1 + 0.8 * (acceptance_length - 1):.2f}: four fifths of the accepted drafts that were measured here "
        f"({acceptance_length:.2f})",
        f"its time per token is not below the base's (measured here: {in_words(low.tpot_gain)} at the low rate, {in_words(high.tpot_gain)} at the "
        "high one; in shared steps, base and canary wait for each other, so the base's rises, too)",
        f"from {percents[-1]:g}% on, tokens a second of the whole coordinator fall by more than {thresholds.max_loss:.0%} against plain decoding",
    )
    return CanaryPlan(config, percents, min_requests, tuple(steps), guards)


def config_file(keys: Mapping[str, Any], comments: list[str]) -> str:
    """A specwire.yaml with these keys of the speculative configuration."""
    return "\n".join([*(f"# {comment}" for comment in comments), "speculative_config:", *_lines(keys)]) + "\n"


def canary_file(keys: Mapping[str, Any], plan: CanaryPlan, comments: list[str]) -> str:
    """A specwire.yaml with which the canary begins: services that can do what the canary does, and a base without drafts."""
    base = {key: value for key, value in keys.items() if key != _ADAPTIVE} | {_SCHEDULE: [[1, 1, 0]]}
    coordinator = {"canary_share": plan.percents[0] / 100, "canary_config": json.dumps(plan.config)}
    return config_file(base, comments) + "\n".join(["coordinator:", *_lines(coordinator)]) + "\n"


def _lines(keys: Mapping[str, Any]) -> list[str]:
    """YAML: JSON values are of it."""
    return [f"  {key}: {json.dumps(value)}" for key, value in keys.items()]
