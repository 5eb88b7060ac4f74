"""TLS files that can't be used are named at the start; files that change are taken over while requests run."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from specwire import tls
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig
from specwire.errors import InvalidArgumentError, SpecwireError, UnavailableError
from specwire.tls import FileWatch, ServerCertificates, ServerTls, TlsOptions, channel_credentials
from tests.scripted.verifier import VerifierScript
from tests.security.certificates import Authority, copy, encrypt_key
from tests.security.conftest import Files, make_files
from tests.security.serving import serving

TAKEN_OVER = "the TLS files have changed and are used from now on"
PAIRS = {
    "no certificate": (lambda f: ("nowhere.crt", f.server.key), "the certificate nowhere.crt can't be read (No such file or directory)"),
    "no key": (lambda f: (f.server.cert, "nowhere.key"), "the key nowhere.key can't be read"),
    "a folder": (lambda f: ("/", f.server.key), "the certificate / can't be read (Is a directory)"),
    "another key": (lambda f: (f.server.cert, f.client.key), "is not that of the certificate"),
    "expired": (lambda f: (f.expired.cert, f.expired.key), "certificate has expired; renew it"),
    "not yet valid": (lambda f: (f.not_yet.cert, f.not_yet.key), "certificate is not yet valid; renew it"),
    "swapped": (lambda f: (f.server.key, f.server.cert), "can't be used"),
    "password": (lambda f: (f.server.cert, encrypt_key(f.server).key), "an unencrypted key in PEM"),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("as_client", [False, True])
def test_a_pair_that_cannot_be_used_says_why(name: str, as_client: bool, files: Files) -> None:
    make, message = PAIRS[name]
    cert, key = make(files)
    use = (lambda: channel_credentials(TlsOptions(files.ca.file, cert, key))) if as_client else ServerCertificates(ServerTls(cert, key)).credentials
    with pytest.raises(InvalidArgumentError) as caught:
        use()
    assert message in str(caught.value)


def test_good_pairs_are_taken(files: Files) -> None:
    for pair in (files.server, files.self_signed, files.foreign, files.other_host):
        channel_credentials(TlsOptions(files.ca.file, pair.cert, pair.key))
        ServerCertificates(ServerTls(pair.cert, pair.key, files.ca.file)).credentials()


@pytest.mark.parametrize(("content", "message"), [(None, "can't be read"), ("", "has no certificate"), ("rubbish", "has no certificate")])
def test_an_authority_file_that_cannot_be_used_says_why(content: str | None, message: str, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    for use in (
        lambda: channel_credentials(TlsOptions(str(path))),
        lambda: ServerCertificates(ServerTls(files.server.cert, files.server.key, str(path))).credentials(),
    ):
        with pytest.raises(InvalidArgumentError, match=f"the CA file {path} {message}"):
            use()


async def test_a_service_does_not_start_with_an_expired_certificate(files: Files) -> None:
    with pytest.raises(InvalidArgumentError, match="certificate has expired"):
        async with serving(tls_cert=files.expired.cert, tls_key=files.expired.key):
            pytest.fail("it serves")


@pytest.mark.parametrize("kind", [CoordinatorConfig, VerifierConfig, DrafterConfig])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tls_cert": "a"}, "--tls-cert is given without --tls-key"),
        ({"tls_key": "a"}, "--tls-key is given without --tls-cert"),
        ({"tls_client_auth": True}, "--tls-client-auth is true, which needs --tls-cert and --tls-ca"),
        ({"tls_client_auth": True, "tls_cert": "a", "tls_key": "b"}, "--tls-client-auth is true, which needs"),
        ({"tls_client_auth": True, "tls_ca": "a"}, "--tls-client-auth is true, which needs"),
    ],
)
def test_half_a_configuration_is_refused(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kind(**values)
    assert message in str(caught.value)


def test_a_caller_without_its_key_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cert is given without key"):
        TlsOptions(cert="a")


def test_watched_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    watch = FileWatch([str(path)])
    assert not watch.has_changed()
    path.write_text("a")
    assert watch.has_changed()
    assert not watch.has_changed()
    (tmp_path / "new").write_text("b")
    (tmp_path / "new").rename(path)  # as renewals do it: another file, perhaps of the same size
    assert watch.has_changed()
    path.unlink()
    assert watch.has_changed()
    assert not watch.has_changed()


async def test_certificates_are_renewed_while_requests_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, tls.__name__)
    files = make_files(tmp_path)
    (tmp_path / "new").mkdir()
    new_ca = Authority(tmp_path / "new", "new-ca")
    renewed = new_ca.issue("renewed")
    async with serving(VerifierScript(delay_s=0.002), tls_cert=files.server.cert, tls_key=files.server.key) as (server, cluster):
        certificates = server._server.certificates
        assert certificates is not None

        async def generate(ca: str, **values: Any) -> list[int]:
            async with AsyncClient(server.bound_addresses[0], tls=TlsOptions(ca), max_retries=0, **values) as client:
                return (await client.generate([5, 6], max_tokens=4, seed=1)).choices[0].token_ids

        expected = cluster.verifiers[0].target.generate([5, 6], 200, 1)
        async with (
            AsyncClient(server.bound_addresses[0], tls=TlsOptions(files.ca.file)) as long,
            long.stream([5, 6], max_tokens=200, seed=1) as stream,
        ):
            token_ids = (await anext(stream)).token_ids
            # A pair that does not belong together: what was there before stays.
            copy(renewed.key, files.server.key)
            assert await generate(files.ca.file) == expected[:4]
            assert await generate(files.ca.file) == expected[:4]
            assert certificates.num_failed_reloads == 1
            assert "the changed TLS files are not used" in caplog.text
            assert TAKEN_OVER not in caplog.text
            files.server.replace_with(renewed)
            assert await generate(new_ca.file) == expected[:4]
            assert caplog.text.count(TAKEN_OVER) == certificates.num_failed_reloads == 1
            with pytest.raises(UnavailableError, match="TLS could not be agreed on"):
                await generate(files.ca.file)
            async for event in stream:
                token_ids += event.token_ids
        assert token_ids == expected


async def test_the_authority_of_clients_is_renewed(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    mutual = {"tls_cert": files.server.cert, "tls_key": files.server.key, "tls_ca": files.ca.file, "tls_client_auth": True}
    async with serving(**mutual) as (server, _):

        async def outcome(cert: str, key: str) -> str:
            async with AsyncClient(server.bound_addresses[0], tls=TlsOptions(server_ca, cert, key), max_retries=0) as client:
                try:
                    await client.generate([5, 6], max_tokens=4)
                except SpecwireError as error:
                    return type(error).__name__
                return "in"

        server_ca = str(tmp_path / "kept.pem")
        copy(files.ca.file, server_ca)
        ours, theirs = (files.client.cert, files.client.key), (files.foreign.cert, files.foreign.key)
        assert [await outcome(*ours), await outcome(*theirs)] == ["in", "UnreachableError"]
        copy(files.other_ca.file, files.ca.file)
        assert [await outcome(*ours), await outcome(*theirs)] == ["UnreachableError", "in"]


async def test_a_client_takes_new_certificates_for_its_next_connection(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    (tmp_path / "new").mkdir()
    new_ca = Authority(tmp_path / "new", "new-ca")
    pair = files.server
    async with serving(tls_cert=pair.cert, tls_key=pair.key) as (server, _):
        address = server.bound_addresses[0]
        client = AsyncClient(address, tls=TlsOptions(files.ca.file), max_retries=0)
        first = await client.generate([5, 6], max_tokens=4, seed=1)
    pair.replace_with(new_ca.issue("renewed"))
    async with client, serving(listen=(address,), tls_cert=pair.cert, tls_key=pair.key):
        with pytest.raises(UnavailableError):
            await client.generate([5, 6], max_tokens=4, seed=1)
        copy(__file__, files.ca.file)  # no PEM
        with pytest.raises(UnavailableError):
            await client.generate([5, 6], max_tokens=4, seed=1)
        copy(new_ca.file, files.ca.file)
        async with asyncio.timeout(20):
            while True:
                try:
                    again = await client.generate([5, 6], max_tokens=4, seed=1)
                    break
                except UnavailableError:
                    continue
        assert again.choices[0].token_ids == first.choices[0].token_ids
