"""Which calls need an API key, and which headers bring one."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from coordinator.api_keys import KeyRing
from specwire.api_keys import hash_key
from specwire.client import AsyncClient
from specwire.errors import InvalidArgumentError, UnauthenticatedError
from specwire.rpc import is_serving, open_channel
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.security.key_file import KEY, File, entry
from tests.security.serving import serving


def calls() -> Iterator[tuple[str, Any]]:
    service = pb.DESCRIPTOR.services_by_name["CoordinatorService"]
    for method in service.methods:
        yield method.name, method


@pytest.mark.parametrize("name", [name for name, _ in calls()])
async def test_every_method_needs_a_key(name: str, file: File) -> None:
    file.write(entry())
    method = dict(calls())[name]
    request = getattr(pb, method.input_type.name)()
    async with serving(api_keys=file.path) as (server, _), open_channel(server.bound_addresses[0]) as channel:
        call = getattr(CoordinatorServiceStub(channel), name)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            # Nothing is written to a stream: gRPC's client may take the write that fails for the end of the call.
            await _finish(call() if method.client_streaming else call(request), streams=method.server_streaming)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "authorization: Bearer KEY" in caught.value.details()
        assert await is_serving(channel), "health needs none"


async def _finish(call: Any, *, streams: bool) -> None:
    if streams:
        async for _ in call:
            pass
    else:
        await call


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", KEY),),
        (("authorization", f"Basic {KEY}"),),
        (("authorization", f"Bearer {KEY}x"),),
        (("authorization", f"Bearer {KEY[:-1]}"),),
        (("authorization", f"Bearer {hash_key(KEY)}"),),
        (("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")),
        (("x-api-key", KEY),),
        (("authorization-bin", KEY.encode()),),
    ],
)
def test_other_headers_are_no_key(metadata: tuple[tuple[str, str], ...], file: File) -> None:
    file.write(entry())
    keys = KeyRing(file.path)
    with pytest.raises(UnauthenticatedError):
        keys.authenticate(metadata)
    assert keys.num_refused.total() == 1
    for good in (f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "):
        assert keys.find(keys.authenticate((("authorization", good),))).name == "blue"


@pytest.mark.parametrize("key", ["a b", "a\n", "ä", "\x00"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the API key has spaces"):
        AsyncClient(api_key=key)


async def test_the_environment_has_the_key(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write(entry())
    monkeypatch.setenv("SPECWIRE_API_KEY", KEY)
    async with serving(api_keys=file.path) as (server, _):
        async with AsyncClient(server.bound_addresses[0]) as blue:
            await blue.generate([5, 6], max_tokens=1)
        async with AsyncClient(server.bound_addresses[0], api_key="") as nobody:
            with pytest.raises(UnauthenticatedError):
                await nobody.generate([5, 6], max_tokens=1)


async def test_a_wrong_file_keeps_the_coordinator_from_starting(file: File) -> None:
    file.break_()
    with pytest.raises(InvalidArgumentError, match="are neither YAML nor JSON"):
        async with serving(api_keys=file.path):
            pytest.fail("it serves")


async def test_keys_in_the_clear_are_warned_of(file: File, caplog: pytest.LogCaptureFixture) -> None:
    file.write(entry())
    async with serving(api_keys=file.path):
        assert "in the clear" not in caplog.text
    async with serving(api_keys=file.path, listen=("0.0.0.0:0",)):
        assert "API keys travel in the clear to 0.0.0.0:" in caplog.text
    assert KEY not in caplog.text
