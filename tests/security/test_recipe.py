"""The documented way to certificates, and what a service says that other machines can reach without them."""

import asyncio
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from specwire import AsyncClient, TlsOptions
from specwire.config import CoordinatorConfig
from specwire.config_file import read_config_file
from specwire.config_layers import resolve
from specwire.rpc import Server
from specwire.tls import ServerTls
from tests.security.certificates import Authority
from tests.security.serving import serving

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


def documented(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the recipe needs the program openssl")
def test_certificates_of_the_recipe_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the documented `specwire.yaml`, but for the port."""
    monkeypatch.chdir(tmp_path)
    commands = [line[2:] for block in documented("console") for line in block.splitlines() if line.startswith("$ openssl")]
    assert len(commands) == 3
    for command in commands:
        subprocess.run(shlex.split(command), check=True, capture_output=True, timeout=60)
    [text] = [block for block in documented("yaml") if block.startswith("coordinator:")]
    Path("specwire.yaml").write_text(text)
    config = resolve(CoordinatorConfig, "coordinator", [read_config_file(Path("specwire.yaml"))]).config
    assert (config.listen, config.api_keys) == (("0.0.0.0:50050",), "api-keys.yaml")
    asyncio.run(call_with_tls(config))


async def call_with_tls(config: CoordinatorConfig) -> None:
    async with serving(tls_cert=config.tls_cert, tls_key=config.tls_key) as (server, _):
        address = server.bound_addresses[0]
        for host in (address, address.replace("127.0.0.1", "localhost")):
            for ca in ("ca.pem", "c.crt"):
                async with AsyncClient(host, tls=TlsOptions(ca=ca)) as client:
                    assert (await client.generate([5, 6], max_tokens=2)).token_ids


@pytest.mark.parametrize(
    ("listen", "has_tls", "has_client_ca", "has_keys", "warning"),
    [
        ("127.0.0.1:0", False, False, False, ""),
        ("0.0.0.0:0", False, False, False, "can call it and read along"),
        ("0.0.0.0:0", False, False, True, "API keys travel in the clear to 0.0.0.0:"),
        ("0.0.0.0:0", True, False, False, "can call it: set tls_client_auth"),
        ("0.0.0.0:0", True, True, False, ""),
        ("0.0.0.0:0", True, False, True, ""),
    ],
)
async def test_open_addresses_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, listen: str, has_tls: bool, has_client_ca: bool, has_keys: bool, warning: str
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tls = ServerTls(pair.cert, pair.key, authority.file if has_client_ca else "") if has_tls else None
    server = Server([listen], ["x"], lambda _: None, tls=tls, has_keys=has_keys)
    await server.start()
    await server.stop(0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(warning)
    assert all(warning in text for text in warnings)
