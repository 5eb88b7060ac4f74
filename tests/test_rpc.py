"""Options that channels and servers share."""

from pathlib import Path

from grpc._cython import cygrpc

from specwire import rpc


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
