"""Options that channels and servers share."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from specwire import rpc
from specwire.errors import UnavailableError


def test_grpc_knows_every_option() -> None:
    """It ignores names that it does not know: a wrong one shows when streams that idle for a minute end with `too_many_pings`."""
    library = Path(cygrpc.__file__).read_bytes()
    options = [*rpc.channel_options(1), *rpc.server_options(1)]
    assert len(options) > 8
    for name, _ in options:
        assert name.encode() + b"\0" in library, f"gRPC knows no option {name!r}"


def test_a_server_allows_the_pings_that_clients_send() -> None:
    client, server = dict(rpc.channel_options(1)), dict(rpc.server_options(1))
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]


async def test_a_socket_in_a_folder_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    """gRPC's own complaint would name neither."""
    server = rpc.Server(["unix:missing/x.sock"], [], lambda _: None)
    with pytest.raises(UnavailableError, match=r"^cannot listen on unix:missing/x\.sock \(there is no folder missing\)"):
        await server.start()
    assert capfd.readouterr().err == ""
