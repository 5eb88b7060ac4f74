"""Features over gRPC with mutual TLS: a drafter that shows the right certificate gets them, and any other hears why it does not."""

import asyncio

import pytest

from drafter_svc.features import Located
from drafter_svc.rpc import PulledStream
from specwire.config import DrafterConfig
from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.tls import ServerTls, TlsOptions, client_tls
from tests.engine.features.sources import eagle_source
from tests.security.conftest import Files
from tests.verifier.harness import Rounds, describe, make_verifier, open_message, prefill
from verifier_svc.loading import LoadedVerifier
from verifier_svc.server import VerifierServer

SOURCE, PROMPT = eagle_source(32), list(range(3, 20))
LIMIT = 1 << 20


def test_a_drafter_calls_verifiers_with_its_own_certificate(files: Files) -> None:
    config = DrafterConfig(tls_cert=files.client.cert, tls_key=files.client.key, tls_ca=files.ca.file)
    assert client_tls(config) == TlsOptions(files.ca.file, files.client.cert, files.client.key)
    assert client_tls(DrafterConfig()) is None


async def test_mutual_tls(files: Files) -> None:
    verifier = make_verifier(features=[SOURCE])
    [handle] = Rounds(verifier).launch([prefill(0, 100)], opens=[open_message(0, PROMPT)]).features
    tls = ServerTls(files.server.cert, files.server.key, files.ca.file)
    server = VerifierServer(["127.0.0.1:0"], lambda: LoadedVerifier(verifier, describe(verifier), None), "v", tls=tls)
    await server.start()
    try:
        await server.load()
        [address] = server.bound_addresses
        span = Located(handle.place, handle.generation, handle.new_block_ids, 0, len(PROMPT))

        async def pull(options: TlsOptions | None) -> int:
            path = PulledStream(address, "", SOURCE, LIMIT, options, timeout_s=10.0)
            try:
                [found] = await asyncio.to_thread(path.read, [span])
            finally:
                path.close()
            assert found is not None
            return len(found)

        assert await pull(TlsOptions(files.ca.file, files.client.cert, files.client.key)) == len(PROMPT)
        for options in (
            None,
            TlsOptions(files.ca.file),
            TlsOptions(files.other_ca.file, files.client.cert, files.client.key),
            TlsOptions(files.ca.file, files.foreign.cert, files.foreign.key),
        ):
            with pytest.raises(SpecwireError):
                await pull(options)
        with pytest.raises(InvalidArgumentError, match="expired"):
            await pull(TlsOptions(files.ca.file, files.expired.cert, files.expired.key))
    finally:
        await server.stop(1.0)
