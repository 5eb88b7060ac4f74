"""`specwire keys`: makes API keys for a coordinator's file."""

from pathlib import Path
from typing import Any

import typer

from specwire.api_keys import ApiKey, add_api_key, hash_key, make_key, parse_expiry


def add_key(name: str, path: Path, expires: str | None, **limits: int | None) -> None:
    """Makes a key, appends its entry to the file and prints the key, which nothing else has.

    Args:
        name: of whom it is for.
        path: the file; made if it is not there.
        expires: date or time, or None.
        **limits: of ApiKey.

    Raises:
        InvalidArgumentError: a wrong value, or a file that can't be used.
    """
    key = make_key()
    values: dict[str, Any] = limits
    add_api_key(str(path), ApiKey(name, hash_key(key), expires=parse_expiry(expires), **values))
    typer.echo(f"{path} has the hash of a key for {name}. This is the key, shown once:", err=True)
    typer.echo(key)
