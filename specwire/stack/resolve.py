"""From flags and files to the configuration of every service of a stack."""

import dataclasses
import os
from collections.abc import Sequence

from specwire.config import MAX_REPLICAS, CoordinatorConfig, DrafterConfig, HttpConfig, UpConfig, VerifierConfig
from specwire.config_layers import DEFAULT, ConfigError, Layer, ListedDrafter, Problem, Resolved, Setting, Source, resolve
from specwire.draft_checkpoint import HEAD_METHODS
from specwire.stack.gpu_shares import share_gpus
from specwire.stack.plan import StackOptions, without_drafters

_ORIGIN = "specwire up"


def resolve_stack(sources: Sequence[Source], num_cores: int | None = None) -> StackOptions:
    """The services that these sources ask for, the strongest last.

    Args:
        num_cores: CPU cores to share out; by default those that this process may use.

    One verifier may use all cores: a drafter that runs a model works while the verifier waits for it, ngram and coordinator need little.

    Raises:
        ConfigError: some values are wrong.
    """
    up = resolve(UpConfig, "up", sources)
    cores = num_cores or len(os.sched_getaffinity(0))
    threads = {"num_threads": _derived(max(1, cores // up.config.verifiers))} if up.config.verifiers > 1 else {}
    verifier = resolve(VerifierConfig, "verifier", [Source({"verifier": Layer(threads)}), *sources]).config
    # Any drafter may have to take over the sequences of all verifiers.
    seqs = {"max_num_seqs": _derived(verifier.max_num_seqs * up.config.verifiers)}
    drafters = resolve_drafters(up.config.drafters, up.origins["drafters"], [Source({"drafter": Layer(seqs)}), *sources])
    drafters = tuple(_with_target(each, verifier.model) for each in drafters)
    coordinator = resolve(CoordinatorConfig, "coordinator", sources)
    listen = coordinator.config.listen
    if coordinator.origins["listen"] == DEFAULT or up.origins["port"] != DEFAULT:
        listen = (f"127.0.0.1:{up.config.port}",)
    options = StackOptions(up.config, verifier, drafters, dataclasses.replace(coordinator.config, listen=listen), _resolve_http(up, sources))
    if not drafters or options.coordinator.speculative_config.method is None:
        options = without_drafters(options)
    verifier, drafters = share_gpus(up.config.verifiers, options.verifier, options.drafters)
    return dataclasses.replace(options, verifier=verifier, drafters=drafters)


def resolve_drafters(number: int, origin: str, sources: Sequence[Source]) -> tuple[DrafterConfig, ...]:
    """The drafters that these sources ask for.

    Args:
        number: up.drafters, and where that comes from.

    Raises:
        ConfigError: some values are wrong, or do not go with `drafters`.
    """
    listed = next((source.drafters for source in reversed(sources) if source.drafters is not None), None)
    if number == 0:
        return ()
    if listed is None:
        config = resolve(DrafterConfig, "drafter", sources).config
        return () if config.speculative_config.method is None else (config,) * number
    if origin != DEFAULT:
        raise ConfigError([Problem(origin, f"up.drafters is {number}, but `drafters` lists them; give each entry its count, or remove the list")])
    drafters = tuple(config for entry in listed for config in [_resolve_listed(entry, sources)] * entry.count)
    if len(drafters) > MAX_REPLICAS:
        raise ConfigError([Problem(listed[-1].origin, f"drafters are {len(drafters)} in all, but must be at most {MAX_REPLICAS}; lower their count")])
    return drafters


def _resolve_listed(entry: ListedDrafter, sources: Sequence[Source]) -> DrafterConfig:
    config = resolve(DrafterConfig, "drafter", sources, entry).config
    if config.speculative_config.method is None:
        raise ConfigError([Problem(entry.origin, "an entry has no method, and speculative_config.method is null; give it one, or remove the entry")])
    return config


def _with_target(config: DrafterConfig, target: str) -> DrafterConfig:
    """A head shares parts of the target, and a draft model's tokenizer may be compared with the target's, which is known here."""
    spec = config.speculative_config
    if config.target_model or not (spec.model_method in HEAD_METHODS or spec.use_heterogeneous_vocab):
        return config
    return dataclasses.replace(config, target_model=target)


def _derived(value: int) -> Setting:
    return Setting(value, _ORIGIN, _ORIGIN)


def _resolve_http(up: Resolved[UpConfig], sources: Sequence[Source]) -> HttpConfig | None:
    """None where it is not wanted."""
    if not up.config.http:
        return None
    http = resolve(HttpConfig, "http", sources)
    if http.origins["listen"] == DEFAULT or up.origins["http_port"] != DEFAULT:
        return dataclasses.replace(http.config, listen=(f"127.0.0.1:{up.config.http_port}",))
    return http.config
