"""One standard gRPC health check. Containers run it every few seconds, so it loads nothing else of gRPC's or ours."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def check_health(address: str, timeout_s: float) -> str:
    """The overall health that a service answers (SERVING, NOT_SERVING), or the gRPC status of a call that failed and what it says."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name} ({error.details()})"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
