"""The configuration of every service that `specwire up` starts."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specwire.cli.gpu_shares import share_gpus
from specwire.config import MAX_REPLICAS, CoordinatorConfig, DrafterConfig, HttpConfig, UpConfig, VerifierConfig, flags
from specwire.config_layers import DEFAULT, ConfigError, Layer, ListedDrafter, Problem, Resolved, Setting, Source, resolve
from specwire.draft_checkpoint import HEAD_METHODS
from specwire.errors import FailedPreconditionError, InvalidArgumentError
from specwire.launch import ServiceSpec

ServiceConfig = VerifierConfig | DrafterConfig | CoordinatorConfig | HttpConfig
AnyConfig = TypeVar("AnyConfig", VerifierConfig, DrafterConfig, CoordinatorConfig, HttpConfig)
Speculative = TypeVar("Speculative", VerifierConfig, CoordinatorConfig)

_ORIGIN = "specwire up"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `specwire up` is to start.

    Args:
        up: what it alone knows.
        verifier: of each of the up.verifiers verifiers.
        drafters: of each drafter; empty = plain decoding.
        coordinator: its first address is where clients call; port 0 = any free one.
        http: None = no HTTP API.
    """

    up: UpConfig
    verifier: VerifierConfig
    drafters: tuple[DrafterConfig, ...]
    coordinator: CoordinatorConfig
    http: HttpConfig | None


@dataclass(frozen=True, slots=True)
class Stack:
    """The services, each with its configuration."""

    verifiers: tuple[VerifierConfig, ...]
    drafters: tuple[DrafterConfig, ...]
    coordinator: CoordinatorConfig
    http: HttpConfig | None

    @property
    def address(self) -> str:
        """Where clients call."""
        return self.coordinator.listen[0]

    @property
    def private_address(self) -> str:
        """Where this machine may call the coordinator without TLS."""
        return self.coordinator.listen[-1]

    def groups(self) -> list[list[ServiceSpec]]:
        """The processes in the order of starting: the coordinator needs the verifiers and measures nothing of a drafter that loads."""
        drafters = [_spec(_numbered("drafter", index, self.drafters), "drafter_svc", config) for index, config in enumerate(self.drafters)]
        verifiers = [_spec(_numbered("verifier", index, self.verifiers), "verifier_svc", config) for index, config in enumerate(self.verifiers)]
        http = [] if self.http is None else [_spec("http", "specwire.http", self.http, health=self.http.health_listen)]
        # Stopping goes backwards: HTTP, coordinator, drafters, verifiers. Without drafters there is no group for them.
        return [group for group in (verifiers, drafters, [_spec("coordinator", "coordinator", self.coordinator, essential=True)], http) if group]


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


def without_drafters(options: StackOptions) -> StackOptions:
    """The same stack, decoding plainly."""
    return dataclasses.replace(options, verifier=_plain(options.verifier), drafters=(), coordinator=_plain(options.coordinator))


def plan_stack(options: StackOptions, folder: Path) -> Stack:
    """Gives every service its addresses.

    Args:
        folder: private folder for the Unix sockets between the services.

    A port that a service started before has is passed over: where all are given port p for their metrics, they take p, p + 1, ...
    """
    verifiers = [dataclasses.replace(options.verifier, listen=(f"unix:{folder}/verifier-{index}",)) for index in range(options.up.verifiers)]
    drafters = [dataclasses.replace(config, listen=(f"unix:{folder}/drafter-{index}",)) for index, config in enumerate(options.drafters)]
    coordinator = dataclasses.replace(
        options.coordinator,
        # Where health is asked for, whatever TLS the others have.
        listen=(*options.coordinator.listen, f"unix:{folder}/coordinator"),
        verifiers=tuple(config.listen[0] for config in verifiers),
        drafters=tuple(config.listen[0] for config in drafters),
    )
    listen = options.coordinator.listen + (() if options.http is None else options.http.listen)
    taken = {int(address.rpartition(":")[2]) for address in listen if not address.startswith("unix:")}
    verifiers = [_with_free_ports(config, taken) for config in verifiers]
    drafters = [_with_free_ports(config, taken) for config in drafters]
    coordinator, http = _with_free_ports(coordinator, taken), options.http
    if http is not None:
        http = dataclasses.replace(_with_free_ports(http, taken), coordinator=coordinator.listen[-1], health_listen=f"unix:{folder}/http")
    return Stack(tuple(verifiers), tuple(drafters), coordinator, http)


def plan_private_stack(options: StackOptions, folder: Path) -> Stack:
    """As `plan_stack`, for the use of this program alone: clients call over a socket in the folder, without keys, and there is no HTTP API."""
    coordinator = dataclasses.replace(options.coordinator, listen=(f"unix:{folder}/clients",), api_keys="")
    return plan_stack(dataclasses.replace(options, coordinator=coordinator, http=None), folder)


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


def check_engine() -> None:
    """Raises FailedPreconditionError unless what runs models is installed."""
    missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise FailedPreconditionError(f"models are run here, but {', '.join(missing)} is not installed: pip install 'specwire[engine]'")


def check_models(options: StackOptions) -> None:
    """Raises InvalidArgumentError if one of the models is a path to nothing."""
    check_model(options.verifier.model)
    for drafter in options.drafters:
        if drafter.speculative_config.has_model and drafter.speculative_config.model:
            check_model(drafter.speculative_config.model)


def check_model(model: str) -> None:
    """Raises InvalidArgumentError if the model is a path to nothing; the service that loads it checks everything else."""
    path = Path(model).expanduser()
    if (path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~"))) and not path.exists():
        raise InvalidArgumentError(f"the model {model} does not exist; give a Hugging Face folder, a .gguf file or a hub id")


def _resolve_listed(entry: ListedDrafter, sources: Sequence[Source]) -> DrafterConfig:
    config = resolve(DrafterConfig, "drafter", sources, entry).config
    if config.speculative_config.method is None:
        raise ConfigError([Problem(entry.origin, "an entry has no method, and speculative_config.method is null; give it one, or remove the entry")])
    return config


def _plain(config: Speculative) -> Speculative:
    speculative = dataclasses.replace(config.speculative_config, method=None, model=None)
    return dataclasses.replace(config, speculative_config=speculative)


def _with_target(config: DrafterConfig, target: str) -> DrafterConfig:
    """A head shares parts of the target, and a draft model's tokenizer may be compared with the target's, which is known here."""
    spec = config.speculative_config
    if config.target_model or not (spec.method in HEAD_METHODS or spec.use_heterogeneous_vocab):
        return config
    return dataclasses.replace(config, target_model=target)


def _derived(value: int) -> Setting:
    return Setting(value, _ORIGIN, _ORIGIN)


def _with_free_ports(config: AnyConfig, taken: set[int]) -> AnyConfig:
    """Its addresses beside `listen` (metrics_listen), at ports that are not taken."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        address = getattr(config, field.name)
        if field.name.endswith("_listen") and address and not address.startswith("unix:"):
            host, _, port = address.rpartition(":")
            number = int(port)
            while number and number in taken:
                number += 1
            taken.add(number)
            changes[field.name] = f"{host}:{number}"
    return dataclasses.replace(config, **changes)


def _numbered(kind: str, index: int, all_of_kind: tuple[object, ...]) -> str:
    return kind if len(all_of_kind) == 1 else f"{kind}-{index}"


def _resolve_http(up: Resolved[UpConfig], sources: Sequence[Source]) -> HttpConfig | None:
    """None where it is not wanted."""
    if not up.config.http:
        return None
    http = resolve(HttpConfig, "http", sources)
    if http.origins["listen"] == DEFAULT or up.origins["http_port"] != DEFAULT:
        return dataclasses.replace(http.config, listen=(f"127.0.0.1:{up.config.http_port}",))
    return http.config


def _spec(name: str, module: str, config: ServiceConfig, essential: bool = False, health: str = "") -> ServiceSpec:
    # The flags are complete: a file that the environment names would add what was overridden here.
    return ServiceSpec(name, module, ("--config=", *flags(config)), health or config.listen[-1], essential)
