"""The frame of the service processes."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from specwire.fork_environment import VARIABLE
from specwire.process import allow_all_files, set_model_environment
from specwire.service_environment import VARIABLES


@pytest.mark.parametrize(("given", "expected"), [(None, "4000"), ("7", "7")])
def test_the_model_environment_is_a_default(monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    set_model_environment()
    assert os.environ["GOMP_SPINCOUNT"] == expected


@pytest.mark.parametrize("service", ["verifier_svc", "drafter_svc"])
def test_services_import_torch_after_the_environment_is_set(service: str) -> None:
    """Its libraries read the environment when they are loaded."""
    script = f"import sys, {service}.__main__; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


_WATCHED = """
import importlib, os, sys

class Watch:
    found = None

    def find_spec(self, name, path, target=None):
        if name == "grpc._cython":
            Watch.found = os.environ.get("GRPC_EXPERIMENTS")

os.environ.pop("GRPC_EXPERIMENTS", None)
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
sys.exit(int(Watch.found != "-event_engine_client,-event_engine_listener"))
"""


@pytest.mark.parametrize("module", ["coordinator.__main__", "verifier_svc.__main__", "drafter_svc.__main__", "specwire.http.worker"])
def test_grpc_is_imported_after_its_event_loop_is_chosen(module: str) -> None:
    assert subprocess.run([sys.executable, "-c", _WATCHED, module], check=False).returncode == 0


_START_MANY = """
import specwire.fork_environment
import asyncio, contextlib, sys
import grpc, uvloop

async def call(address):
    while True:
        async with grpc.aio.insecure_channel(address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.unary_unary("/none/None")(b"")

async def main(address):
    server = grpc.aio.server()
    server.add_insecure_port(address)
    await server.start()
    calls = [asyncio.create_task(call(address)) for _ in range(3)]
    for _ in range(200):
        child = await asyncio.create_subprocess_exec("/bin/true", stdin=asyncio.subprocess.DEVNULL)
        assert await child.wait() == 0, child.returncode
    for one in calls:
        one.cancel()
    await server.stop(0)

uvloop.run(main(sys.argv[1]))
"""


def test_children_that_start_beside_live_connections_are_well(socket_dir: Path) -> None:
    """On uvloop, which forks."""
    command = [sys.executable, "-c", _START_MANY, f"unix:{socket_dir}/server"]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE[0]}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["specwire.cli", "specwire.service_environment"])
def test_programs_that_start_others_choose_so_before_grpc(module: str) -> None:
    """Without gRPC, which reads it when it is imported, the module may not get any further."""
    script = (
        f"import contextlib, os, sys\nsys.modules['grpc'] = None\n"
        f"with contextlib.suppress(ImportError):\n    import {module}\nprint(os.environ['{VARIABLE[0]}'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE[0]}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout == "0\n"


def test_grpc_knows_the_names_of_its_event_loops() -> None:
    """It says so of others."""
    variables = dict(VARIABLES) | {"GRPC_VERBOSITY": "INFO"}
    for names, is_known in ((variables["GRPC_EXPERIMENTS"], True), ("-no_such_loop", False)):
        environment = os.environ | variables | {"GRPC_EXPERIMENTS": names}
        script = "import grpc; grpc.insecure_channel('unix:none').close()"
        said = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True).stderr
        assert ("Unknown experiment" in said) != is_known, said


@pytest.mark.parametrize(
    ("soft", "most", "accepted", "expected"),
    [
        (256, resource.RLIM_INFINITY, 10_240, 10_240),  # macOS
        (20_000, resource.RLIM_INFINITY, 10_240, 20_000),
        (256, 4096, 4096, 4096),
        (256, resource.RLIM_INFINITY, 512, 256),
    ],
)
def test_as_many_files_as_the_system_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, soft: int, most: int, accepted: int, expected: int
) -> None:
    limits = [(soft, most)]

    def set_limit(_: int, wanted: tuple[int, int]) -> None:
        if not 0 < wanted[0] <= accepted:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    allow_all_files()
    assert limits[-1] == (expected, most)
    assert ("keeps its limit of" in caplog.text) == (expected == soft)


_SERVE = """
import asyncio, sys
from specwire.process import run_service

async def serve():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    assert server.sockets[0].fileno() > 2, server.sockets
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await reader.read()
    writer.close()
    server.close()
    await server.wait_closed()
    print("printed")
    print("printed", file=sys.stderr)

run_service("coordinator", serve)
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_service_without_standard_files(closed: tuple[int, ...]) -> None:
    """uvloop aborts where a socket that it closes has one of their numbers."""
    redirect = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, _SERVE], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if 1 in closed else "printed\n")
    assert ("printed" in done.stderr) == (2 not in closed)


def test_a_service_takes_all_files_that_it_may_have() -> None:
    """Clients beyond the 1024 of a shell would keep its peers out."""
    script = (
        "import resource\nfrom specwire.process import run_service\n"
        "async def serve():\n    print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "run_service('coordinator', serve)"
    )
    command = ["sh", "-c", 'ulimit -Sn 64; ulimit -Hn 300; exec "$0" -c "$1"', sys.executable, script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "(300, 300)\n"), done.stderr


def test_the_command_line_without_standard_files() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$0" -m specwire.cli --version <&- 2>&-', sys.executable], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:9], done.stderr) == (0, "specwire ", "")
