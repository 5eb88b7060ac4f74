"""TLS on every connection and API keys, with services as processes and the commands that users type."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specwire.cli.app import app
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.speculative_config import SpeculativeConfig
from specwire.tls import ServerTls
from tests.integration.stack import Service
from tests.scripted.scripts import byte_verifier_script
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier
from tests.security.certificates import HOST, Pair
from tests.security.conftest import Files

PROMPT = "abab"


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for service in started:
        if service.is_running:
            service.kill()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"{HOST}:{probe.getsockname()[1]}"


def mutual(pair: Pair, files: Files) -> dict[str, object]:
    return {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": files.ca.file, "tls_client_auth": True}


async def specwire(*arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SPECWIRE_API_KEY": key}
    command = [sys.executable, "-m", "specwire.cli", *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=environment, timeout=60)


async def test_everything_at_once(files: Files, tmp_path: Path, services: list[Service]) -> None:
    verifier = ScriptedVerifier(byte_verifier_script())
    served = ScriptedService(verifier, tls=ServerTls(files.server.cert, files.server.key, files.ca.file))
    keys = str(tmp_path / "keys.yaml")
    key = CliRunner().invoke(app, ["keys", "new", "blue", "--file", keys]).stdout.strip()
    drafter = DrafterConfig(listen=(free_address(),), **mutual(files.server, files))  # type: ignore[arg-type]
    coordinator = CoordinatorConfig(
        listen=(free_address(),),
        verifiers=(await served.start(),),
        drafters=drafter.listen,
        api_keys=keys,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3),
        **mutual(files.client, files),  # type: ignore[arg-type]
    )
    for config in (drafter, coordinator):
        services.append(Service(config))
        services[-1].start()
    await asyncio.to_thread(services[-1].wait_ready)
    await asyncio.to_thread(services[-1].wait_for, f"drafter {drafter.listen[0]} is there")
    call = ("generate", PROMPT, "--max-tokens", "30", "--seed", "1", "--address", coordinator.listen[0], "--tls-ca", files.ca.file)
    certificate = ("--tls-cert", files.client.cert, "--tls-key", files.client.key)
    answer = await specwire(*call, *certificate, key=key)
    assert answer.stdout == bytes(verifier.target.generate(list(PROMPT.encode()), 30, 1)).decode() + "\n", answer.stderr
    mistakes = (
        ((*call, *certificate), "sw-wrong", "the API key is not known here"),
        (call, key, "can't be reached"),
        ((*call, "--tls-cert", files.client.cert), key, "--tls-cert is given without --tls-key"),
    )
    outcomes = await asyncio.gather(*(specwire(*arguments, key=with_key) for arguments, with_key, _ in mistakes))
    for (_, _, message), refused in zip(mistakes, outcomes, strict=True):
        assert refused.returncode > 0
        assert message in refused.stderr
        assert refused.stdout == ""
        assert key not in refused.stderr
    await served.kill()


@pytest.mark.parametrize("kind", [CoordinatorConfig, DrafterConfig])
def test_a_service_with_a_bad_certificate_says_so_and_ends(kind: type, files: Files, services: list[Service]) -> None:
    peers = {"verifiers": (f"{HOST}:1",)} if kind is CoordinatorConfig else {}
    service = Service(kind(listen=(f"{HOST}:0",), tls_cert=files.expired.cert, tls_key=files.expired.key, **peers))
    services.append(service)
    service.start()
    assert service.wait_ended() == 1
    assert f"the certificate {files.expired.cert} can't be used: certificate has expired; renew it" in service.log
    assert "Traceback" not in service.log
