"""`specwire health` against servers in every state."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner, Result

from specwire.cli import app
from specwire.tls import read_ca, read_pair
from tests.security.certificates import Authority

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["health", *arguments])


@pytest.fixture
def servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def address(socket_dir: Path, servicer: health.HealthServicer) -> Iterator[str]:
    """A server whose health the servicer decides."""
    address = f"unix:{socket_dir}/health.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None).wait()


def test_only_a_service_that_serves_is_healthy(address: str, servicer: health.HealthServicer) -> None:
    for status, name, exit_code in ((SERVING, "SERVING", 0), (NOT_SERVING, "NOT_SERVING", 1), (SERVING, "SERVING", 0)):
        servicer.set("", status)
        result = check(address)
        assert (result.stdout, result.exit_code) == (f"{address}: {name}\n", exit_code)


def test_address_from_the_environment(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECWIRE_HEALTH_ADDRESS", address)
    assert check().exit_code == 0


def test_nobody_is_there(socket_dir: Path) -> None:
    result = check(f"unix:{socket_dir}/missing.sock")
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stdout


def test_one_that_says_nothing_is_waited_for_only_so_long(socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{socket_dir}/silent.sock")
        silent.listen()
        result = check(f"unix:{socket_dir}/silent.sock", "--timeout", "0.2")
    assert result.exit_code == 1
    assert "DEADLINE_EXCEEDED" in result.stdout


def test_tls_in_both_directions(tmp_path: Path, servicer: health.HealthServicer) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("service")
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([read_pair(pair.cert, pair.key)], read_ca(authority.file), True))
    server.start()
    try:
        address = f"127.0.0.1:{port}"
        servicer.set("", SERVING)
        tls = ("--tls-ca", authority.file)
        assert check(address, *tls, "--tls-cert", pair.cert, "--tls-key", pair.key).exit_code == 0
        for arguments in ((), tls):
            result = check(address, *arguments)
            assert (result.exit_code, "UNAVAILABLE" in result.stdout) == (1, True), result.output
        for wrong in (("--tls-cert", pair.cert), ("--tls-ca", f"{tmp_path}/nowhere.pem")):
            assert check(address, *wrong).exit_code == 2
    finally:
        server.stop(None).wait()


def test_the_quick_way_of_containers(address: str, servicer: health.HealthServicer) -> None:
    """They check every few seconds: it loads little, and answers alike."""
    script = "import sys, specwire.health; print(*sorted({'numpy', 'typer', 'specwire.rpc', 'specwire.v1'} & sys.modules.keys()))"
    assert not subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    for status, exit_code in ((SERVING, 0), (NOT_SERVING, 1)):
        servicer.set("", status)
        command = [sys.executable, "-m", "specwire.health"]
        assert subprocess.run(command, env=os.environ | {"SPECWIRE_HEALTH_ADDRESS": address}, capture_output=True).returncode == exit_code


def test_a_server_that_hangs_up_is_asked_about_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.health.check_health", lambda *_: "UNAVAILABLE (Socket closed)")
    result = CliRunner().invoke(app, ["health", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "UNAVAILABLE (Socket closed); it hung up: is it a server that speaks gRPC, and do both sides use TLS, or neither?" in result.stdout


def test_an_http_server_is_told_apart() -> None:
    """What the OpenAI-compatible API's port says to gRPC."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = check(f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.exit_code == 1
    assert "what answers there speaks no gRPC: the OpenAI-compatible API and the metrics have ports of their own" in result.stdout
