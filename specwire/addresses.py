"""Addresses as users write them, host:port or unix:path, and whether they can be listened on."""

import re
import socket
from pathlib import Path

from specwire.errors import InvalidArgumentError
from specwire.text import is_unicode

_MAX_SOCKET_PATH_BYTES = 107
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+(%\w+)?\]|[\w.-]+):([0-9]{1,5})")
_DNS = "dns:///"


def check_address(name: str, address: str, lowest_port: int = 1) -> None:
    """Raise InvalidArgumentError unless it is `host:port` or `unix:path`; who calls it may also say `dns:///host:port`, as gRPC does.

    Args:
        name: what the one who gave it calls it.
        lowest_port: 0 = it is one to listen on.
    """
    if not isinstance(address, str):
        raise InvalidArgumentError(f"{name} is {address!r}, but must be text: host:port or unix:path")
    _check_one_address(f"{name} is", address, address.removeprefix(_DNS) if lowest_port else address, lowest_port)


def check_addresses(name: str, addresses: tuple[str, ...], lowest_port: int) -> None:
    """Raise InvalidArgumentError unless all are addresses, at least one, and none is there twice; see `check_address`."""
    if not addresses:
        raise InvalidArgumentError(f"{name} is empty; give at least one address, host:port or unix:path")
    for address in addresses:
        _check_one_address(f"{name} has", address, address, lowest_port)
    if len(set(addresses)) < len(addresses):
        raise InvalidArgumentError(f"{name} is {','.join(addresses)!r}, which names an address twice; remove one")


def is_local(address: str) -> bool:
    """Whether only this machine can reach what listens there."""
    return address.startswith(("unix:", "127.", "localhost:", "[::1]:"))


def check_free(address: str) -> None:
    """Raise OSError where an address can't be bound: gRPC itself would log that in its own way, and take over a live Unix socket."""
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:").removeprefix("//"))
        if not path.parent.is_dir():
            raise OSError(f"there is no folder {path.parent}")
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(str(path)) == 0:
                raise OSError("another process serves on it")
        return
    host, _, port = address.rpartition(":")
    family, kind, _, _, where = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen()


def _check_one_address(subject: str, given: str, address: str, lowest_port: int) -> None:
    if not is_unicode(given):
        raise InvalidArgumentError(f"{subject} {given!r}, which is no UTF-8; write it in UTF-8")
    if given.startswith("unix:"):
        num_bytes = len(given.removeprefix("unix:").encode())
        if not 1 <= num_bytes <= _MAX_SOCKET_PATH_BYTES:
            raise InvalidArgumentError(
                f"{subject} {given!r}, whose path has {num_bytes} bytes, but a socket's path must have 1 to {_MAX_SOCKET_PATH_BYTES}; "
                "choose another folder"
            )
        return
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or not lowest_port <= int(match[3]) <= 65535:
        raise InvalidArgumentError(f"{subject} {given!r}, but must be unix:path or host:port with a port from {lowest_port} to 65535")
