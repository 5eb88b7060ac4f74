"""TLS from PEM files: what a server shows, what a caller trusts, and both again once the files have changed."""

import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from specwire.config import CoordinatorConfig, DrafterConfig, HttpConfig, VerifierConfig, check_both
from specwire.errors import InvalidArgumentError, SpecwireError

logger = logging.getLogger(__name__)

_HANDSHAKE_TURNS = 4
_HANDSHAKE_MARKS = ("handshake failed", "CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "Hostname Verification", "peer name", "peer certificate")
_HUNG_UP = "Socket closed"
_NO_GRPC = "Failed parsing HTTP/2"
"""What a server with TLS does to a client without: it says nothing."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How a caller connects with TLS. Empty fields are left to their defaults.

    Args:
        ca: PEM file of the authorities that the server's certificate must come from; default: the public ones that gRPC knows.
        cert, key: PEM files of the caller's own certificate chain and key, for servers that ask for them (mutual TLS); both or none.
        server_name: the name that the server's certificate must have; default: the host of the address.

    Raises:
        InvalidArgumentError: only one of cert and key. What is in the files is read, and checked, whenever a connection is made.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        check_both("cert", self.cert, "key", self.key)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server uses on its TCP addresses.

    Args:
        cert, key: PEM files of its certificate chain and key.
        client_ca: PEM file of the authorities that clients' certificates must come from; empty = clients need none.
    """

    cert: str
    key: str
    client_ca: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path)


def server_tls(config: CoordinatorConfig | VerifierConfig | DrafterConfig | HttpConfig) -> ServerTls | None:
    """What a service serves with; None = without TLS."""
    return ServerTls(config.tls_cert, config.tls_key, config.tls_ca if config.tls_client_auth else "") if config.tls_cert else None


def client_tls(config: CoordinatorConfig | DrafterConfig) -> TlsOptions | None:
    """What a coordinator calls verifiers and drafters with, and a drafter verifiers, for features; None = without TLS."""
    return TlsOptions(config.tls_ca, config.tls_cert, config.tls_key) if config.tls_ca else None


class FileWatch:
    """Says whether files have changed since it was last asked. One that is not there counts as a change too."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Whether any of them is another one than at the last call."""
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_look_at, self._paths))


class ServerCertificates:
    """A server's certificate, read again at the first handshake after its files have changed. New files that can't be used change nothing:
    the server goes on with what it has.

    Attributes:
        num_failed_reloads: changes that could not be used.
    """

    def __init__(self, tls: ServerTls) -> None:
        self.num_failed_reloads = 0
        self._tls = tls
        self._watch = FileWatch(tls.files)

    def credentials(self) -> grpc.ServerCredentials:
        """For the server's ports. Raises InvalidArgumentError if the files can't be used now."""
        return grpc.dynamic_ssl_server_credentials(
            self._load(),
            self._reload,  # type: ignore[arg-type]  # the stub does not know of None: nothing new
            require_client_authentication=bool(self._tls.client_ca),
        )

    def _load(self) -> grpc.ServerCertificateConfiguration:
        tls = self._tls
        key, cert = read_pair(tls.cert, tls.key)
        return grpc.ssl_server_certificate_configuration([(key, cert)], read_ca(tls.client_ca) if tls.client_ca else None)

    def _reload(self) -> grpc.ServerCertificateConfiguration | None:
        """On gRPC's threads, once a handshake; None = nothing new."""
        if not self._watch.has_changed():
            return None
        try:
            configuration = self._load()
        except SpecwireError as error:
            self.num_failed_reloads += 1
            logger.error("the changed TLS files are not used, the ones before stay: %s", error)
            return None
        logger.info("the TLS files have changed and are used from now on: %s", ", ".join(self._tls.files))
        return configuration


def channel_credentials(tls: TlsOptions) -> grpc.ChannelCredentials:
    """For a new channel. Raises InvalidArgumentError if a file can't be used."""
    ca = read_ca(tls.ca) if tls.ca else None
    key, cert = read_pair(tls.cert, tls.key, as_client=True) if tls.cert else (None, None)
    return grpc.ssl_channel_credentials(ca, key, cert)


def read_pair(cert: str, key: str, *, as_client: bool = False) -> tuple[bytes, bytes]:
    """Key and certificate chain (PEM), in gRPC's order.

    Raises:
        InvalidArgumentError: a file can't be read, is no PEM, they are no pair, or the certificate is not valid now or not for this use.
    """
    key_pem, cert_pem = _read("key", key), _read("certificate", cert)
    try:
        _try_out(cert, key, as_client=as_client)
    except ssl.SSLCertVerificationError as error:
        raise InvalidArgumentError(f"the certificate {cert} can't be used: {error.verify_message}; renew it") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgumentError(f"the key {key} is not that of the certificate {cert}; give two files that were made together") from error
        text = f"the certificate {cert} and its key {key} can't be used ({error.reason or error})"
        raise InvalidArgumentError(f"{text}; give a certificate chain and an unencrypted key in PEM") from error
    return key_pem, cert_pem


def read_ca(path: str) -> bytes:
    """The authorities of a PEM file. Raises InvalidArgumentError if it can't be read or has no certificate."""
    content = _read("CA file", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise InvalidArgumentError(f"the CA file {path} has no certificate ({error.reason or error}); give one or more in PEM") from error
    return content


def explain_handshake(details: str) -> str:
    """What to do about a call's error that has to do with how the two sides greet each other, TLS or not; empty if it has not."""
    if _NO_GRPC in details:
        return "what answers there speaks no gRPC: the OpenAI-compatible API and the metrics have ports of their own; is it one of them?"
    if _HUNG_UP in details:
        return "it hung up: is it a server that speaks gRPC, and do both sides use TLS, or neither?"
    if not any(mark in details for mark in _HANDSHAKE_MARKS):
        return ""
    return (
        "TLS could not be agreed on: the server's certificate must be valid, come from the CA in use and name the host of the address, "
        "and both sides must use TLS"
    )


def _try_out(cert: str, key: str, *, as_client: bool) -> None:
    """A handshake in memory, in which the other side trusts this very certificate: OpenSSL itself says whether it is valid now, for this
    use, and the key's. Raises ssl.SSLError."""
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if as_client else ssl.PROTOCOL_TLS_SERVER)
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if as_client else ssl.PROTOCOL_TLS_CLIENT)
    own.check_hostname = other.check_hostname = False
    own.verify_mode, other.verify_mode = ssl.CERT_NONE, ssl.CERT_REQUIRED
    other.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN
    own.load_cert_chain(cert, key, password=_no_password)
    other.load_verify_locations(cafile=cert)
    client, server = (own, other) if as_client else (other, own)
    if as_client:
        server.load_cert_chain(cert, key, password=_no_password)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for side in sides * _HANDSHAKE_TURNS:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue


def _no_password() -> str:
    """Without it OpenSSL would ask on the terminal."""
    return ""


def _read(kind: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgumentError(f"the {kind} {path} can't be read ({error.strerror}); check the path and who may read it") from error


def _look_at(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
