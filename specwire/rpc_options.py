"""Options of gRPC's channels and servers: sizes, patience and what strangers may hold."""

import resource

from specwire.config_fields import MAX_NUMBER

_MAX_METADATA_BYTES = 8 << 10
"""Of one call's headers; gRPC itself refuses more with RESOURCE_EXHAUSTED."""
KEEPALIVE_MS = 20_000, 10_000
"""Silence until a ping is sent, and until the connection is given up: a host that vanished closes no socket."""
PEER_KEEPALIVE_MS = 3_000, 5_000
"""The same from the coordinator to its verifiers and drafters: a lost replica must be noticed within 10 s."""
HOLDER_KEEPALIVE_MS = 2_000, 2_500
"""The same from a verifier to the coordinator that holds it: 5 s after that is gone, another one may come."""
_HANDSHAKE_MS = 10_000
"""What a connection may take to become one of HTTP/2, TLS included. gRPC's own two minutes let strangers who say nothing hold descriptors."""
_OWN_FILES = 256
"""Descriptors that connections of clients leave to the service itself: its peers, log, metrics and files."""


def channel_options(max_message_bytes: int, keepalive_ms: tuple[int, int] = KEEPALIVE_MS) -> list[tuple[str, int]]:
    """Options of a channel whose messages may have max_message_bytes either way; reconnects wait at most a second."""
    return [
        *_message_limits(max_message_bytes),
        *_keepalive(keepalive_ms),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In spite of its name this is how long one attempt may take: a busy peer's loop can need more than the backoff.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Channels of one process to one address must not share a connection: each stream keeps its own flow control.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message_bytes: int, keepalive_ms: tuple[int, int] = KEEPALIVE_MS, max_connections: int = MAX_NUMBER) -> list[tuple[str, int]]:
    """Options of a server whose messages may have max_message_bytes either way; it takes the keepalive pings of channels that idle.

    Args:
        max_connections: most at each address; further ones are closed at once.
    """
    return [
        *_message_limits(max_message_bytes),
        *_keepalive(keepalive_ms),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def connection_limit(num_addresses: int) -> int:
    """How many each address may have, so that whatever comes leaves this process files for its own needs (specwire.process.allow_all_files)."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MAX_NUMBER if most == resource.RLIM_INFINITY else min(most, MAX_NUMBER)
    return max(1, max(most // 2, most - _OWN_FILES) // max(1, num_addresses))


def _keepalive(keepalive_ms: tuple[int, int]) -> list[tuple[str, int]]:
    time_ms, timeout_ms = keepalive_ms
    return [
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # gRPC also pings to measure bandwidth. While such a ping is unanswered, for a minute by default, no keepalive ping is sent.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", max_message_bytes), ("grpc.max_send_message_length", max_message_bytes)]
