"""Who gets in: every way to connect, with everything that can be wrong with a certificate, and with every kind of API key."""

from collections.abc import Callable

import pytest

from specwire import tls as tls_module
from specwire.client import AsyncClient
from specwire.errors import SpecwireError, UnauthenticatedError, UnavailableError
from specwire.tls import TlsOptions
from tests.security.certificates import Pair
from tests.security.conftest import Files, Keys
from tests.security.serving import serving

Server = Callable[[Files], Pair | None]
Caller = Callable[[Files], TlsOptions | None]


def trusting(files: Files, client: Pair | None = None, *, ca: str = "") -> TlsOptions:
    return TlsOptions(ca or files.ca.file, client.cert if client else "", client.key if client else "")


SITUATIONS: dict[str, dict[str, tuple[Server, Caller, bool]]] = {
    "no TLS": {
        "right": (lambda f: None, lambda f: None, True),
        "wrong CA": (lambda f: None, lambda f: trusting(f, ca=f.other_ca.file), False),
        "expired": (lambda f: None, lambda f: trusting(f, f.expired), False),
        "self-signed": (lambda f: None, lambda f: trusting(f, f.self_signed), False),
        "no client certificate": (lambda f: None, lambda f: trusting(f), False),
        "wrong host name": (lambda f: None, lambda f: trusting(f, f.other_host), False),
    },
    "TLS": {
        "right": (lambda f: f.server, lambda f: trusting(f, f.client), True),
        "wrong CA": (lambda f: f.server, lambda f: trusting(f, ca=f.other_ca.file), False),
        "wrong CA of the server": (lambda f: f.foreign, lambda f: trusting(f), False),
        "expired": (lambda f: f.expired, lambda f: trusting(f), False),
        "not yet valid": (lambda f: f.not_yet, lambda f: trusting(f), False),
        "self-signed": (lambda f: f.self_signed, lambda f: trusting(f), False),
        "self-signed and trusted": (lambda f: f.self_signed, lambda f: trusting(f, ca=f.self_signed.cert), True),
        "no client certificate": (lambda f: f.server, lambda f: trusting(f), True),
        "wrong host name": (lambda f: f.other_host, lambda f: trusting(f), False),
        "wrong host name, but expected": (lambda f: f.other_host, lambda f: TlsOptions(f.ca.file, server_name="elsewhere.example"), True),
        "public authorities": (lambda f: f.server, lambda f: TlsOptions(), False),
        "no TLS at the client": (lambda f: f.server, lambda f: None, False),
    },
    "mutual TLS": {
        "right": (lambda f: f.server, lambda f: trusting(f, f.client), True),
        "wrong CA": (lambda f: f.server, lambda f: trusting(f, f.client, ca=f.other_ca.file), False),
        "wrong CA of the client": (lambda f: f.server, lambda f: trusting(f, f.foreign), False),
        "expired": (lambda f: f.expired, lambda f: trusting(f, f.client), False),
        "expired at the client": (lambda f: f.server, lambda f: trusting(f, f.expired), False),
        "self-signed": (lambda f: f.self_signed, lambda f: trusting(f, f.client), False),
        "self-signed at the client": (lambda f: f.server, lambda f: trusting(f, f.self_signed), False),
        "no client certificate": (lambda f: f.server, lambda f: trusting(f), False),
        "wrong host name": (lambda f: f.other_host, lambda f: trusting(f, f.client), False),
        "client of another host": (lambda f: f.server, lambda f: trusting(f, f.other_host), True),
        "no TLS at the client": (lambda f: f.server, lambda f: None, False),
    },
}
CASES = [(transport, situation) for transport, situations in SITUATIONS.items() for situation in situations]


@pytest.mark.parametrize(("transport", "situation"), CASES)
async def test_who_gets_in(transport: str, situation: str, files: Files, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both sides refuse to show a certificate that is not valid; here the other side must refuse it.
    monkeypatch.setattr(tls_module, "_try_out", lambda *_, **__: None)
    server_pair, caller, connects = SITUATIONS[transport][situation]
    pair, tls = server_pair(files), caller(files)
    config = {} if pair is None else {"tls_cert": pair.cert, "tls_key": pair.key}
    if transport == "mutual TLS":
        config |= {"tls_ca": files.ca.file, "tls_client_auth": True}
    async with serving(api_keys=keys.file, **config) as (server, cluster):
        for kind, key in (("right", keys.right), ("wrong", keys.wrong), ("none", ""), ("expired", keys.expired)):
            outcome: SpecwireError | list[int]
            async with AsyncClient(server.bound_addresses[0], tls=tls, api_key=key, max_retries=0) as client:
                try:
                    outcome = (await client.generate([5, 6], max_tokens=4, seed=1)).choices[0].token_ids
                except SpecwireError as error:
                    outcome = error
            if not connects:
                assert isinstance(outcome, UnavailableError), f"{kind}: {outcome}"
            elif kind == "right":
                assert outcome == cluster.verifiers[0].target.generate([5, 6], 4, 1)
            else:
                assert isinstance(outcome, UnauthenticatedError), f"{kind}: {outcome}"
                assert "API key" in str(outcome)
                assert not key or key not in str(outcome)


async def test_a_client_without_tls_is_told_of_tls(files: Files) -> None:
    async with serving(tls_cert=files.server.cert, tls_key=files.server.key) as (server, _), AsyncClient(server.bound_addresses[0]) as client:
        with pytest.raises(UnavailableError, match="do both sides use TLS, or neither"):
            await client.generate("a", max_tokens=1)
        with pytest.raises(UnavailableError, match="do both sides use TLS, or neither"):
            await client.get_status()
        with pytest.raises(UnavailableError, match="do both sides use TLS, or neither"):
            await client.wait_ready(0.2)
