"""The configuration of every service that `specwire up` starts."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from specwire.config import DEFAULT_PORT, CoordinatorConfig, DrafterConfig, VerifierConfig, flags
from specwire.errors import InvalidArgumentError
from specwire.launch import ServiceSpec
from specwire.speculative_config import SpeculativeConfig

_VERIFIER = VerifierConfig()


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `specwire up` was asked for. Most fields are the verifier's (specwire.config).

    Raises:
        InvalidArgumentError: a value that no service could be started with.
    """

    model: str = _VERIFIER.model
    load_format: str = _VERIFIER.load_format
    dtype: str = _VERIFIER.dtype
    device: str = _VERIFIER.device
    num_threads: int = _VERIFIER.num_threads
    max_model_len: int = _VERIFIER.max_model_len
    max_num_seqs: int = _VERIFIER.max_num_seqs
    max_num_batched_tokens: int = _VERIFIER.max_num_batched_tokens
    kv_cache_memory: int = _VERIFIER.kv_cache_memory
    port: int = DEFAULT_PORT
    num_verifiers: int = 1
    num_drafters: int = 1
    speculative_config: SpeculativeConfig = _VERIFIER.speculative_config

    def __post_init__(self) -> None:
        for flag, value, low, high in (
            ("--port", self.port, 0, 65535),
            ("--verifiers", self.num_verifiers, 1, 64),
            ("--drafters", self.num_drafters, 0, 64),
        ):
            if not low <= value <= high:
                raise InvalidArgumentError(f"{flag} is {value}, but must be from {low} to {high}")
        # The services' own checks, before anything is started.
        plan_stack(self, Path("folder"), self.port)


@dataclass(frozen=True, slots=True)
class Stack:
    """The services, each with its configuration."""

    verifiers: tuple[VerifierConfig, ...]
    drafters: tuple[DrafterConfig, ...]
    coordinator: CoordinatorConfig

    @property
    def address(self) -> str:
        """Where clients call."""
        return self.coordinator.listen[0]

    def groups(self) -> list[list[ServiceSpec]]:
        """The processes in the order of starting: the coordinator needs the verifiers and measures nothing of a drafter that loads."""
        drafters = [_spec(_numbered("drafter", index, self.drafters), "drafter_svc", config) for index, config in enumerate(self.drafters)]
        verifiers = [_spec(_numbered("verifier", index, self.verifiers), "verifier_svc", config) for index, config in enumerate(self.verifiers)]
        # Stopping goes backwards: coordinator, drafters, verifiers. Without drafters there is no group for them.
        return [group for group in (verifiers, drafters, [_spec("coordinator", "coordinator", self.coordinator, essential=True)]) if group]


def plan_stack(options: StackOptions, folder: Path, port: int, num_cores: int | None = None) -> Stack:
    """Configures every service.

    Args:
        folder: private folder for the Unix sockets between the services.
        port: for clients, on 127.0.0.1.
        num_cores: CPU cores to share out; by default those that this process may use.

    One verifier may use all cores: a drafter that runs a model works while the verifier waits for it, ngram and coordinator need little.
    """
    cores = num_cores or len(os.sched_getaffinity(0))
    num_threads = options.num_threads or (0 if options.num_verifiers == 1 else max(1, cores // options.num_verifiers))
    speculative = options.speculative_config
    if not options.num_drafters or speculative.method is None:
        speculative = dataclasses.replace(speculative, method=None, model=None)
    verifiers = tuple(
        VerifierConfig(
            listen=(f"unix:{folder}/verifier-{index}",),
            model=options.model,
            load_format=options.load_format,
            dtype=options.dtype,
            device=options.device,
            num_threads=num_threads,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_cache_memory=options.kv_cache_memory,
            speculative_config=speculative,
        )
        for index in range(options.num_verifiers)
    )
    drafters = tuple(
        DrafterConfig(
            listen=(f"unix:{folder}/drafter-{index}",),
            load_format=options.load_format,
            dtype=options.dtype,
            device=options.device,
            num_threads=options.num_threads,
            # Any one of them may have to take over the sequences of all.
            max_num_seqs=options.max_num_seqs * options.num_verifiers,
            kv_cache_memory=options.kv_cache_memory,
            speculative_config=speculative,
        )
        for index in range(options.num_drafters if speculative.method is not None else 0)
    )
    coordinator = CoordinatorConfig(
        listen=(f"127.0.0.1:{port}",),
        verifiers=tuple(config.listen[0] for config in verifiers),
        drafters=tuple(config.listen[0] for config in drafters),
        speculative_config=speculative,
    )
    return Stack(verifiers, drafters, coordinator)


def _numbered(kind: str, index: int, all_of_kind: tuple[object, ...]) -> str:
    return kind if len(all_of_kind) == 1 else f"{kind}-{index}"


def _spec(name: str, module: str, config: VerifierConfig | DrafterConfig | CoordinatorConfig, essential: bool = False) -> ServiceSpec:
    return ServiceSpec(name, module, tuple(flags(config)), config.listen[0], essential)
