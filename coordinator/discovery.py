"""Which addresses the configured ones stand for: a host name may stand for any number of replicas, and is looked up again and again."""

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from specwire.degraded_log import DegradedLog

from .counters import Counters

logger = logging.getLogger(__name__)

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> the IP addresses that the host has now, none if there is no such host. Raises OSError where that can't be told."""
_NO_SUCH_HOST = (socket.EAI_NONAME, socket.EAI_NODATA)


class Discovery:
    """The addresses of single peers that a list of configured ones stands for.

    An IP address or a Unix socket stands for itself, a host name for every address that it has. A name that can't be looked up keeps the
    addresses that it had.

    Args:
        entries: configured addresses, `host:port` or `unix:path`.
        resolve: looks a host up.
        counters: gets the number of failures.
    """

    def __init__(self, entries: Sequence[str], resolve: Resolver, counters: Counters) -> None:
        self._entries = tuple(entries)
        self._resolve = resolve
        self._counters = counters
        self._log = DegradedLog(logger)
        self._found: dict[str, tuple[str, ...]] = {entry: () if is_name(entry) else (entry,) for entry in entries}
        self._lookups: dict[str, asyncio.Task[Sequence[str]]] = {}
        self._problems: dict[str, str] = {}

    @property
    def has_names(self) -> bool:
        """Whether there is anything to look up."""
        return any(is_name(entry) for entry in self._entries)

    @property
    def server_names(self) -> dict[str, str]:
        """Each address with the host name that it was found by: what the peer calls itself; empty for one that was configured itself."""
        names = {entry: entry.rpartition(":")[0] if is_name(entry) else "" for entry in self._entries}
        return {address: names[entry] for entry in reversed(self._entries) for address in self._found[entry]}

    @property
    def addresses(self) -> list[str]:
        """As of the last look-up, each once, in the order of the configuration."""
        return list(dict.fromkeys(address for entry in self._entries for address in self._found[entry]))

    @property
    def problem(self) -> str:
        """Why names have no address, or not the latest ones; empty if all is well."""
        return "; ".join(self._problems.values())

    async def look_up(self, timeout_s: float) -> None:
        """Looks all names up. What is not known after timeout_s counts as a failure now, and is taken when it comes."""
        for entry in self._entries:
            if is_name(entry) and entry not in self._lookups:
                host, _, port = entry.rpartition(":")
                self._lookups[entry] = asyncio.ensure_future(self._resolve(host, int(port)))
        if self._lookups:
            await asyncio.wait(self._lookups.values(), timeout=timeout_s)
        for entry, lookup in list(self._lookups.items()):
            if lookup.done():
                del self._lookups[entry]
                self._take(entry, lookup)
            else:
                self._fail(entry, f"no answer within {timeout_s:g} s")

    def close(self) -> None:
        """Forgets look-ups that are under way."""
        for lookup in self._lookups.values():
            lookup.cancel()

    def _take(self, entry: str, lookup: "asyncio.Task[Sequence[str]]") -> None:
        error = lookup.exception()
        if error is not None:
            self._fail(entry, str(error) or type(error).__name__)
            return
        port = entry.rpartition(":")[2]
        found = tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in sorted(set(lookup.result())))
        if found:
            self._problems.pop(entry, None)
        else:
            self._problems[entry] = f"{entry} has no address"
        if found != self._found[entry]:
            logger.info("%s stands for %s", entry, ", ".join(found) or "no address any more")
            self._found[entry] = found

    def _fail(self, entry: str, reason: str) -> None:
        self._counters.num_lookup_failures += 1
        self._problems[entry] = f"{entry} can't be looked up: {reason}"
        self._log.warning(entry, "%s; goes on with %s", self._problems[entry], ", ".join(self._found[entry]) or "none")


def is_name(address: str) -> bool:
    """Whether an address has a host name, which may stand for several replicas."""
    if address.startswith("unix:"):
        return False
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


def resolve_host(host: str, port: int) -> "asyncio.Future[Sequence[str]]":
    """A `Resolver` that asks the system. It does so in a thread of its own, which nobody waits for: a look-up can hang for a minute."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Sequence[str]] = loop.create_future()

    def settle(found: Sequence[str] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def look_up() -> None:
        found: Sequence[str] | Exception
        try:
            found = _hosts(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: no such name can exist
            found = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=look_up, name=f"look-up of {host}", daemon=True).start()
    return answer


def _hosts(host: str, port: int) -> list[str]:
    try:
        found = {str(where[0]) for _, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_HOST:
            return []
        raise
    if any(ipaddress.ip_address(ip.partition("%")[0]).is_loopback and ":" not in ip for ip in found):
        found.discard("::1")  # the same machine once more
    return sorted(found)
