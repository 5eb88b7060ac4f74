"""One standard gRPC health check. Containers run `python -m specwire.health` every few seconds, so it loads nothing else of gRPC's or ours."""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = "SERVING"
ADDRESS_VARIABLE = "SPECWIRE_HEALTH_ADDRESS"
DEFAULT_TIMEOUT_S = 5.0


def check_health(address: str, timeout_s: float = DEFAULT_TIMEOUT_S, credentials: grpc.ChannelCredentials | None = None) -> str:
    """The overall health that a service answers (SERVING, NOT_SERVING), or the gRPC status of a call that failed and what it says.

    Args:
        credentials: for TLS; Unix sockets never have it.
    """
    with_tls = None if address.startswith("unix:") else credentials
    with grpc.insecure_channel(address) if with_tls is None else grpc.secure_channel(address, with_tls) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name} ({error.details()})"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def main() -> None:
    """Asks the service at SPECWIRE_HEALTH_ADDRESS; exit status as of `specwire health`."""
    status = check_health(os.environ[ADDRESS_VARIABLE])
    sys.stdout.write(f"{status}\n")
    sys.exit(0 if status == SERVING else 1)


if __name__ == "__main__":
    main()
