"""What a command's configuration is made of: the file, then `--set`, then flags."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from specwire.arguments import flags_layer, speculative_flag
from specwire.config import ClientConfig
from specwire.config_file import find_config_file, read_config_file, read_override
from specwire.config_layers import Layer, Source, resolve
from specwire.speculative_config import read_keys


def read_sources(named: str | None, overrides: Sequence[str]) -> list[Source]:
    """The file (named, of the environment, or ./specwire.yaml; stderr says which) and what `--set` says.

    Raises:
        InvalidArgumentError: a named file is not there.
        ConfigError: something in it is wrong.
    """
    path = find_config_file(named, in_folder=True)
    if path is not None:
        typer.echo(f"specwire: configuration of {path}", err=True)
    return [*([read_config_file(path)] if path else []), *map(read_override, overrides)]


def client_defaults(command: object) -> dict[str, Any]:
    """Defaults of a command and those below it, as click takes them: the address of the file's section `client`, if it has one.

    Raises:
        InvalidArgumentError, ConfigError: as of `read_sources`.
    """
    path = find_config_file(None, in_folder=True)
    source = read_config_file(path) if path else Source()
    if "address" not in source.sections.get("client", Layer()).fields:
        return {}
    address = resolve(ClientConfig, "client", [source]).config.address
    return _defaults(command, address)


def flags_source(sections: Mapping[str, Mapping[str, Any]], speculative: str | None) -> Source:
    """Flags by section and field, None where one was not given; speculative_config is JSON for all services."""
    layers = {name: flags_layer({key: value for key, value in fields.items() if value is not None}) for name, fields in sections.items()}
    return Source(layers, speculative_flag(read_keys(speculative)) if speculative is not None else {})


def _defaults(command: object, address: str) -> dict[str, Any]:
    if isinstance(command, TyperGroup):
        return {name: _defaults(each, address) for name, each in command.commands.items()}
    return {"address": address}
