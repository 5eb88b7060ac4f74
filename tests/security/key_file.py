"""A file of API keys, and clients that bring them."""

from pathlib import Path
from typing import Any

import yaml

from coordinator.api_keys import KeyRing
from coordinator.server import CoordinatorServer
from specwire.api_keys import hash_key, make_key
from specwire.client import AsyncClient

KEY, OTHER_KEY = make_key(), make_key()


class File:
    """A file of API keys that a test rewrites."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def write(self, *entries: dict[str, Any]) -> None:
        Path(self.path).write_text(yaml.safe_dump(list(entries)))

    def break_(self) -> None:
        Path(self.path).write_text("- [")


def entry(name: str = "blue", key: str = KEY, **limits: Any) -> dict[str, Any]:
    return {"name": name, "hash": hash_key(key), **limits}


def client(server: CoordinatorServer, key: str = KEY, **values: Any) -> AsyncClient:
    return AsyncClient(server.bound_addresses[0], api_key=key, max_retries=0, **values)


def look_at_once(server: CoordinatorServer) -> KeyRing:
    """The file is looked at for every request, not once a second."""
    assert server.keys is not None
    server.keys._check_interval_s = 0.0
    return server.keys
