"""The services that run together on one machine, and their addresses."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specwire.config import CoordinatorConfig, DrafterConfig, HttpConfig, UpConfig, VerifierConfig, flags
from specwire.launch import ServiceSpec

ServiceConfig = VerifierConfig | DrafterConfig | CoordinatorConfig | HttpConfig
AnyConfig = TypeVar("AnyConfig", VerifierConfig, DrafterConfig, CoordinatorConfig, HttpConfig)
Speculative = TypeVar("Speculative", VerifierConfig, CoordinatorConfig)


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

    def groups(self, *, restarts_coordinator: bool = False) -> list[list[ServiceSpec]]:
        """The processes in the order of starting: the coordinator needs the verifiers and measures nothing of a drafter that loads.

        Args:
            restarts_coordinator: another one takes its place when it ends, for clients that call again; else its end is the end of everything.
        """
        drafters = [_spec(_numbered("drafter", index, self.drafters), "drafter_svc", config) for index, config in enumerate(self.drafters)]
        verifiers = [_spec(_numbered("verifier", index, self.verifiers), "verifier_svc", config) for index, config in enumerate(self.verifiers)]
        http = [] if self.http is None else [_spec("http", "specwire.http", self.http, health=self.http.health_listen)]
        coordinator = _spec("coordinator", "coordinator", self.coordinator, essential=not restarts_coordinator)
        # Stopping goes backwards: HTTP, coordinator, drafters, verifiers. Without drafters there is no group for them.
        return [group for group in (verifiers, drafters, [coordinator], http) if group]


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


def _plain(config: Speculative) -> Speculative:
    speculative = dataclasses.replace(config.speculative_config, method=None, model=None)
    return dataclasses.replace(config, speculative_config=speculative)


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


def _spec(name: str, module: str, config: ServiceConfig, essential: bool = False, health: str = "") -> ServiceSpec:
    # The flags are complete: a file that the environment names would add what was overridden here.
    return ServiceSpec(name, module, ("--config=", *flags(config)), health or config.listen[-1], essential)
