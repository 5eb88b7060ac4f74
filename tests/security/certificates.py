"""Certificates for tests: an authority, and what it signs, as PEM files."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    cert: str
    key: str

    def replace_with(self, other: "Pair") -> None:
        """Puts another pair in this one's place, key first: for a moment the two do not belong together."""
        copy(other.key, self.key)
        copy(other.cert, self.cert)


class Authority:
    """Signs certificates.

    Args:
        folder: where the files go.
        name: of the authority and its file.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        basic = x509.BasicConstraints(ca=True, path_length=None)
        certificate = _builder(self._name, self._name, self._key, -DAY, 30 * DAY).add_extension(basic, critical=True).sign(self._key, hashes.SHA256())
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, host: str = HOST, *, start: datetime.timedelta = -DAY, end: datetime.timedelta = 30 * DAY) -> Pair:
        """A certificate for a host name or address, good for server and client, from `start` to `end` as seen from now."""
        return self._write(name, host, start, end, self._name, None)

    def issue_self_signed(self, name: str, host: str = HOST) -> Pair:
        """One that signs itself: this authority has nothing to do with it."""
        return self._write(name, host, -DAY, 30 * DAY, _name(name), ec.generate_private_key(ec.SECP256R1()))

    def _write(
        self, name: str, host: str, start: datetime.timedelta, end: datetime.timedelta, issuer: x509.Name, own: ec.EllipticCurvePrivateKey | None
    ) -> Pair:
        key = own or ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(name), issuer, key, start, end)
            .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .sign(own or self._key, hashes.SHA256())
        )
        pair = Pair(str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key"))
        Path(pair.cert).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        Path(pair.key).write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )  # fmt: skip
        return pair


def copy(source: str, target: str) -> None:
    """Writes one file's content into another one."""
    Path(target).write_bytes(Path(source).read_bytes())


def encrypt_key(pair: Pair) -> Pair:
    """The same pair with a key that asks for a password."""
    key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
    encrypted = Pair(pair.cert, pair.key + ".encrypted")
    Path(encrypted.key).write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret"))
    )
    return encrypted


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime.timedelta, end: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now + start).not_valid_after(now + end)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
