"""The options of every command that calls a coordinator (or, for TLS, another service), and the clients that they stand for.

A command takes the parameters that it needs under these types, or all of them as one, by `specwire.cli.option_groups`:

    @grouped
    def generate(connection: ConnectionOptions) -> None:
        with make_client(connection) as client:
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specwire.addresses import check_address
from specwire.config import ADDRESS_VARIABLE, API_KEY_VARIABLE, DEFAULT_ADDRESS, check_both
from specwire.errors import UnreachableError

if TYPE_CHECKING:
    from specwire.client import AsyncClient, Client
    from specwire.tls import TlsOptions

PUBLIC_CA = "public"

Address = Annotated[str, typer.Option(envvar=ADDRESS_VARIABLE, help="The coordinator: host:port or unix:path.")]
ApiKey = Annotated[
    str, typer.Option(envvar=API_KEY_VARIABLE, show_default=False, help="API key, if the coordinator needs one; better in the environment.")
]
TlsCa = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help=f"Use TLS: the server's certificate must come from an authority in this PEM file, or, with `{PUBLIC_CA}`, from a public one.",
    ),
]
TlsCert = Annotated[str, typer.Option(metavar="FILE", show_default=False, help="Own certificate chain (PEM), for servers that ask for one.")]
TlsKey = Annotated[str, typer.Option(metavar="FILE", show_default=False, help="Its key (PEM).")]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to reach a coordinator.

    Args:
        address: `host:port` or `unix:path`.
        api_key: empty = none.
        tls_ca: PEM file, or PUBLIC_CA; empty = no TLS, unless there is a certificate of our own.
        tls_cert, tls_key: own certificate chain and key; both or none.

    Raises:
        InvalidArgumentError: an address that is none, a certificate without a key, or a key without a certificate.
    """

    address: Address = DEFAULT_ADDRESS
    api_key: ApiKey = ""
    tls_ca: TlsCa = ""
    tls_cert: TlsCert = ""
    tls_key: TlsKey = ""

    def __post_init__(self) -> None:
        check_address("the address", self.address)
        check_both("--tls-cert", self.tls_cert, "--tls-key", self.tls_key)

    @property
    def tls(self) -> "TlsOptions | None":
        """None = without TLS."""
        from specwire.tls import TlsOptions  # loads gRPC

        if not self.tls_ca and not self.tls_cert:
            return None
        return TlsOptions("" if self.tls_ca == PUBLIC_CA else self.tls_ca, self.tls_cert, self.tls_key)


def make_client(options: ConnectionOptions, **arguments: Any) -> "Client":
    """A blocking client; `arguments` are further ones of its constructor."""
    from specwire.client import Client

    return Client(options.address, tls=options.tls, api_key=options.api_key, **arguments)


def make_async_client(options: ConnectionOptions, **arguments: Any) -> "AsyncClient":
    """An asynchronous client; `arguments` are further ones of its constructor."""
    from specwire.client import AsyncClient

    return AsyncClient(options.address, tls=options.tls, api_key=options.api_key, **arguments)


@contextlib.contextmanager
def hint_at_up() -> Iterator[None]:
    """Adds to an error that no coordinator is there how to start one."""
    try:
        yield
    except UnreachableError as error:
        raise UnreachableError(f"{error} (`specwire up` starts one on this machine, --address names another)") from error
