"""Who gets how much of a GPU's memory, where `specwire up` starts several processes on one."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from specwire.config import DrafterConfig, VerifierConfig
from specwire.config_layers import ConfigError, Problem

ModelService = TypeVar("ModelService", VerifierConfig, DrafterConfig)

_ORIGIN = "specwire up"
_USUAL = VerifierConfig().gpu_memory_utilization
_LEAST = 0.02
_PARTS = {VerifierConfig: 4, DrafterConfig: 1}
"""A target model and its KV cache against a draft model and its own."""


def share_gpus(num_verifiers: int, verifier: VerifierConfig, drafters: Sequence[DrafterConfig]) -> tuple[VerifierConfig, tuple[DrafterConfig, ...]]:
    """Divides the usual share of a CUDA device among the processes on it that were given none of their own: a verifier gets four times as
    much as a drafter with a model. A process that is alone on its device keeps what it has.

    Raises:
        ConfigError: the shares that were given leave nothing for the others.
    """
    on_device: dict[str, list[VerifierConfig | DrafterConfig]] = defaultdict(list)
    with_model = [each for each in drafters if each.speculative_config.has_model]
    configs: list[VerifierConfig | DrafterConfig] = [*[verifier] * num_verifiers, *with_model]
    for config in configs:
        if config.device != "cpu":
            on_device[_index(config.device)].append(config)
    parts = {device: _part(device, sharing) for device, sharing in on_device.items() if len(sharing) > 1}
    return _with_share(verifier, parts), tuple(_with_share(each, parts) if each.speculative_config.has_model else each for each in drafters)


def _part(device: str, configs: Sequence[VerifierConfig | DrafterConfig]) -> float:
    """One part of what is left of a device."""
    given = sum(config.gpu_memory_utilization for config in configs if config.gpu_memory_utilization != _USUAL)
    num_parts = sum(_PARTS[type(config)] for config in configs if config.gpu_memory_utilization == _USUAL)
    left = (_USUAL - given) / num_parts if num_parts else 1.0 - given
    if left < (_LEAST if num_parts else 0.0):
        text = f"the {len(configs)} processes on GPU {device} were given {given:g} of its memory in all, which leaves too little"
        raise ConfigError([Problem(_ORIGIN, f"{text}; lower gpu_memory_utilization of verifier or drafter, or give them different devices")])
    return left


def _with_share(config: ModelService, parts: Mapping[str, float]) -> ModelService:
    part = parts.get(_index(config.device)) if config.device != "cpu" else None
    if part is None or config.gpu_memory_utilization != _USUAL:
        return config
    return dataclasses.replace(config, gpu_memory_utilization=round(part * _PARTS[type(config)], 3))


def _index(device: str) -> str:
    return device.partition(":")[2] or "0"
