"""What can be said of a stack before anything is started."""

import os
from pathlib import Path

from specwire.errors import InvalidArgumentError
from specwire.stack.plan import StackOptions

_ALL_HOSTS = frozenset({"0.0.0.0", "[::]"})


def check_addresses(options: StackOptions) -> None:
    """Raises InvalidArgumentError if gRPC and HTTP are to have the same port of a host. Port 0 is any free one."""
    for address in () if options.http is None else options.http.listen:
        if any(_are_one(address, other) for other in options.coordinator.listen):
            raise InvalidArgumentError(f"{address} is to be gRPC's and the HTTP API's address; choose another one with --port or --http-port")


def check_models(options: StackOptions) -> None:
    """Raises InvalidArgumentError if one of the models is a path to nothing."""
    check_model(options.verifier.model)
    for drafter in options.drafters:
        if drafter.speculative_config.has_model and drafter.speculative_config.model:
            check_model(drafter.speculative_config.model)


def check_model(model: str) -> None:
    """Raises InvalidArgumentError if the model is a path to nothing; the service that loads it checks everything else."""
    path = Path(os.path.expanduser(model))
    if (path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~"))) and not path.exists():
        raise InvalidArgumentError(f"the model {model} does not exist; give a Hugging Face folder, a .gguf file or a hub id")


def _are_one(address: str, other: str) -> bool:
    (host, _, port), (other_host, _, other_port) = address.rpartition(":"), other.rpartition(":")
    is_unix = address.startswith("unix:") or other.startswith("unix:")
    if is_unix or port != other_port or port == "0":
        return is_unix and address == other
    return host == other_host or not _ALL_HOSTS.isdisjoint((host, other_host))
