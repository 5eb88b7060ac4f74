"""The speculative configuration in effect, as data: for status, `config show` and the log."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specwire.config import CoordinatorConfig
from specwire.config_layers import DEFAULT, SPECULATIVE
from specwire.policy.capacity import EngineDescription
from specwire.policy.schedule import describe_gaps

_SCHEDULE = "num_speculative_tokens_per_batch_size"
_TUNING = ("schedule_hysteresis_steps", "adaptive_hysteresis", "adaptive_probe_share", "calibration_file")


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One key.

    Args:
        value: what takes effect; of the schedule, its ranges without gaps.
        configured: what was written, or the default.
        source: where that was written; "default" if nowhere, "" if the service can't know.
        reasons: why value is not what was configured.
    """

    key: str
    value: Any
    configured: Any
    source: str
    reasons: tuple[str, ...] = ()


def effective_speculation(config: CoordinatorConfig, engine: EngineDescription, origins: Mapping[str, str] | None = None) -> list[EffectiveSetting]:
    """Every key of the coordinator's speculation.

    Args:
        origins: of the coordinator's section (specwire.config_layers.Resolved.origins).
    """
    speculative = config.speculative_config
    settings = []
    for field in dataclasses.fields(speculative):
        configured = getattr(speculative, field.name)
        value, reasons = _effective(field.name, configured, config, engine)
        source = _source(f"{SPECULATIVE}.{field.name}", configured == field.default, origins)
        settings.append(EffectiveSetting(field.name, value, configured, source, tuple(reasons)))
    for name in _TUNING:
        configured = getattr(config, name)
        default = next(field.default for field in dataclasses.fields(config) if field.name == name)
        settings.append(EffectiveSetting(name, configured, configured, _source(name, configured == default, origins)))
    return settings


def _source(key: str, is_default: bool, origins: Mapping[str, str] | None) -> str:
    if origins is not None:
        return origins[key]
    return DEFAULT if is_default else ""


def _effective(key: str, configured: Any, config: CoordinatorConfig, engine: EngineDescription) -> tuple[Any, list[str]]:
    if key == "num_speculative_tokens":
        if not engine.num_speculative_tokens:
            return 0, [_why_no_drafts(config)]
        return engine.num_speculative_tokens, [reason for reason in engine.reasons if reason.startswith("num_speculative_tokens clipped")]
    if key == _SCHEDULE:
        if not engine.num_speculative_tokens or configured is None:
            return engine.schedule_ranges, []
        clipped = [reason for reason in engine.reasons if reason.startswith("[")]
        return engine.schedule_ranges, clipped + describe_gaps(configured, engine.max_num_seqs)
    return configured, []


def _why_no_drafts(config: CoordinatorConfig) -> str:
    if config.speculative_config.method is None:
        return "method is null: nothing is drafted"
    return "there are no drafters" if not config.drafters else "the verifiers take no drafts"
