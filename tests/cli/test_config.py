"""`specwire config`: every problem at once, and what takes effect, from where, and what is clipped."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from specwire.cli import app
from specwire.cli.batch_lines import read_jobs
from specwire.cli.sources import client_defaults
from specwire.client.arguments import make_params
from tests.cli.conftest import Coordinator
from tests.metrics.served import serve_cluster

ROOT = Path(__file__).parents[2]
FILE = """\
speculative_config:
  num_speculative_tokens: 4
  num_speculative_tokens_per_batch_size: [[1, 4, 6], [8, 12, 2], [30, 40, 1]]
verifier:
  max_num_seqs: 16
coordinator:
  max_num_seqs: 20
drafters:
  - {method: ngram, count: 2}
  - {model: draft, num_speculative_tokens: 6}
"""


def config(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments])


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SPECWIRE_CONFIG", "SPECWIRE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def shown(*arguments: str) -> dict[str, Any]:
    result = config("show", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_good_file_has_no_problems() -> None:
    Path("specwire.yaml").write_text(FILE)
    result = config("check")
    assert (result.exit_code, result.stdout) == (0, "specwire.yaml: no problems\n")


def test_all_problems_of_all_sections_are_listed() -> None:
    Path("bad.yaml").write_text(
        """\
verifier:
  max_num_seqs: 0
  dtype: int3
coordinator:
  listen: [nowhere]
speculative_config:
  method: eagle
up: {port: 70000}
drafters:
  - {device: tpu}
"""
    )
    result = config("check", "bad.yaml")
    assert result.exit_code == 1
    starts = [re.match(r"bad.yaml:\d+: [^ ]+", line) for line in result.stdout.splitlines()]
    assert [start and start.group() for start in starts] == [
        "bad.yaml:2: verifier.max_num_seqs", "bad.yaml:3: verifier.dtype", "bad.yaml:5: coordinator.listen",
        "bad.yaml:7: speculative_config.method", "bad.yaml:8: up.port", "bad.yaml:10: drafters[0].device",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("verifier: {modle: x}\n", "specwire.yaml:1: verifier.modle is an unknown key; did you mean model?"),
        ("up: {drafters: 2}\ndrafters: [{}]\n", "specwire.yaml:1: up.drafters is 2, but `drafters` lists them"),
        ("verifier: {max_model_len: 1000000000, max_message_mb: 2}\n", "specwire.yaml:1: a round can take"),
        (
            "drafters: [{method: ngram}]\nspeculative_config: {method: null}\nverifier: {dtype: auto}\nup: {drafters: 1}\n",
            "specwire.yaml:4: up.drafters is 1",
        ),
        ("speculative_config: {method: null}\ndrafters:\n- {count: 2}\n", "specwire.yaml:3: an entry has no method"),
        ("drafter: {tls_key: 3, tls_cert: d.crt}\n", "specwire.yaml:1: drafter.tls_key is 3, but must be text"),
        ("drafters:\n- {tls_key: k}\n", "specwire.yaml:2: drafters[0].tls_key is given without drafters[0].tls_cert"),
        (
            "verifier:\n  weights: int4\n  dtype: float32\n",
            "specwire.yaml:3: verifier.dtype is float32, but verifier.weights is int4, which is computed in bfloat16; leave one of the two out",
        ),
        (
            "up: {port: 8000}\n",
            "specwire.yaml:1: 127.0.0.1:8000 is to be gRPC's and the HTTP API's address; choose another one with --port or --http-port",
        ),
        ("up:\n  http_port: 7\ncoordinator: {listen: 0.0.0.0:7}\n", "specwire.yaml:2: 127.0.0.1:7 is to be gRPC's and the HTTP API's address"),
        (
            "coordinator:\n  canary_config: '{\"num_speculative_tokens\": 6}'\n",
            "specwire.yaml:2: coordinator.canary_config: the canary's num_speculative_tokens is 6, but the services were started for 5",
        ),
        ('coordinator: {canary_config: \'{"method": "guess"}\'}\n', "specwire.yaml:1: coordinator.canary_config: method is 'guess'"),
        (
            "coordinator: {canary_config: '{\"prompt_lookup_min\": 1}'}\n",
            "specwire.yaml:1: coordinator.canary_config: the canary's prompt_lookup_min",
        ),
        (
            "drafter: {device: cuda}\ndrafters:\n- {model: draft, weights: int8}\n",
            "specwire.yaml:3: drafters[0].weights is int8, but drafters[0].device is cuda: formats are for CPUs",
        ),
    ],
)
def test_other_problems_are_found(text: str, problem: str) -> None:
    Path("specwire.yaml").write_text(text)
    result = config("check")
    assert (result.exit_code, result.stdout.count("\n")) == (1, 1)
    assert result.stdout.startswith(problem)


def test_no_problem_hides_another() -> None:
    """Keys that can't be read, values out of range, and values that do not go together, in one section and across sections."""
    Path("bad.yaml").write_text(
        """\
verifier:
  modle: x
  num_threads: many
  max_num_seqs: 0
  tls_cert: v.crt
drafter:
  tls_key: 3
  tls_cert: d.crt
coordinator: [1]
up: {drafters: 2}
drafters: [{count: 2}]
speculative_config: {metod: ngram, num_speculative_tokens: 0}
"""
    )
    result = config("check", "bad.yaml")
    assert result.exit_code == 1
    starts = [re.match(r"bad.yaml:(\d+: [^ ]+)", line) for line in result.stdout.splitlines()]
    assert [start and start[1] for start in starts] == [
        "2: verifier.modle", "3: verifier.num_threads", "4: verifier.max_num_seqs", "5: verifier.tls_cert", "7: drafter.tls_key", "9: coordinator",
        "10: up.drafters", "12: speculative_config.metod", "12: speculative_config.num_speculative_tokens",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("verifier:\n  model: /no/such/model\n", 2),
        ("drafters:\n- {model: ./no-such.gguf}\n", 2),
        ("verifier: {max_num_seqs: 0}\nspeculative_config:\n  model: ~/no-such\n", 3),
    ],
)
def test_models_that_are_not_here_are_warned_of(text: str, line: int) -> None:
    Path("specwire.yaml").write_text(text)
    result = config("check")
    assert result.exit_code == (1 if "max_num_seqs: 0" in text else 0)
    assert re.fullmatch(rf"specwire.yaml:{line}: the model \S+ does not exist; .* \(`specwire up` refuses it here\)\n", result.stderr)


def test_the_file_may_be_named_as_elsewhere() -> None:
    Path("other.yaml").write_text("verifier: {max_num_seqs: 0}\n")
    assert config("check", "--config", "other.yaml").stdout == config("check", "other.yaml").stdout
    assert config("check", "--config=other.yaml").exit_code == config("show", "--config=other.yaml").exit_code - 1 == 1


def test_a_missing_file_is_named() -> None:
    result = config("check", "gone.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no configuration file gone.yaml" in result.stderr
    result = config("check")
    assert result.exit_code == 2
    assert "there is no specwire.yaml here and SPECWIRE_CONFIG names no file" in result.stderr


def test_show_says_where_each_value_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("specwire.yaml").write_text(FILE + "client: {address: 'far:1'}\n")
    monkeypatch.setenv("SPECWIRE_ADDRESS", "near:2")
    sections = shown("--set", "verifier.max_num_seqs=12")["sections"]
    assert sections["verifier"]["max_num_seqs"] == {"value": 12, "from": "--set"}
    assert sections["verifier"]["model"]["from"] == "default"
    assert sections["verifier"]["speculative_config.num_speculative_tokens"] == {"value": 4, "from": "specwire.yaml:2"}
    assert sections["coordinator"]["max_num_seqs"] == {"value": 20, "from": "specwire.yaml:7"}
    assert sections["client"]["address"] == {"value": "near:2", "from": "environment SPECWIRE_ADDRESS"}
    assert shown("--set", "client.address=here:3")["sections"]["client"]["address"] == {"value": "here:3", "from": "--set"}
    monkeypatch.delenv("SPECWIRE_ADDRESS")
    assert shown()["sections"]["client"]["address"] == {"value": "far:1", "from": "specwire.yaml:11"}


def test_show_says_what_is_clipped_and_why() -> None:
    Path("specwire.yaml").write_text(FILE)
    effective = shown()
    assert effective["schedule"] == [[1, 7, 4], [8, 16, 2]]
    assert effective["clipped"] == [
        "max_num_seqs clipped from 20 to 16: a verifier takes no more",
        "[1, 4, 6]: K clipped to num_speculative_tokens = 4",
        "[30, 40, 1]: unused, since max_num_seqs is 16",
        "5 to 7 sequences: in no entry, so that K of [1, 4, 6] goes on",
        "13 to 16 sequences: in no entry, so that K of [8, 12, 2] goes on",
        "drafter 2: its K is 6 and the coordinator's 4, so that it drafts at most 4",
    ]
    assert [(entry["count"], entry["speculative_config.method"]["value"]) for entry in effective["drafters"]] == [(2, "ngram"), (1, "draft_model")]
    speculation = {setting["key"]: setting for setting in effective["speculation"]}
    schedule = speculation["num_speculative_tokens_per_batch_size"]
    assert (schedule["value"], len(schedule["reasons"])) == ([[1, 7, 4], [8, 16, 2]], 4)
    k = speculation["num_speculative_tokens"]
    assert (k["value"], k["configured"], k["source"], k["reasons"]) == (4, 4, "specwire.yaml:2", [])
    assert shown("--set", "up.drafters=0")["schedule"] == [[1, 16, 0]]
    assert shown("--set", "speculative_config.num_speculative_tokens_per_batch_size=[[1, 99, 3]]")["schedule"] == [[1, 16, 3]]


def test_show_without_a_file() -> None:
    effective = shown()
    assert (effective["schedule"], effective["clipped"], effective["drafters"]) == ([[1, 16, 5]], [], [])
    assert {setting["from"] for section in effective["sections"].values() for setting in section.values()} == {"default"}


def test_show_as_tables() -> None:
    Path("specwire.yaml").write_text(FILE)
    result = config("show")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "specwire: configuration of specwire.yaml\n"
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "max_num_seqs 16 specwire.yaml:5",
        "speculative_config, of verifier, drafter and coordinator",
        "num_speculative_tokens_per_batch_size [[1, 4, 6], [8, 12, 2], [30, 40, 1]] specwire.yaml:3",
        "drafters[1] (1), where they differ from drafter",
        "speculative_config.model draft specwire.yaml:10",
        "8-16 2",
        "clipped: [1, 4, 6]: K clipped to num_speculative_tokens = 4",
    ):
        assert line in lines
    assert "\x1b" not in result.stdout


def test_show_refuses_what_check_would_name() -> None:
    result = config("show", "--set", "verifier.dtype=int3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "specwire: --set: verifier.dtype is 'int3', but must be one of auto, float32, bfloat16\n"


@pytest.mark.parametrize("arguments", [("--set", "foo.bar=1"), ("bad.yaml",), ("gone.yaml",), ("--address", "127.0.0.1:x")])
def test_show_with_wrong_arguments(arguments: tuple[str, ...]) -> None:
    Path("bad.yaml").write_text("verifier: {modle: x}\n")
    result = config("show", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.rpartition("specwire: ")[2].strip()


def test_show_says_what_up_would_start() -> None:
    Path("specwire.yaml").write_text(FILE + "up: {port: 7, verifiers: 2}\n")
    starts = shown("--set", "verifier.num_threads=1")["up_starts"]
    assert list(starts) == ["verifier-0", "verifier-1", "drafter-0", "drafter-1", "drafter-2", "coordinator", "http"]
    assert {"--listen=unix:SOCKETS/verifier-1", "--num-threads=1"} <= set(starts["verifier-1"])
    assert "--max-num-seqs=32" in starts["drafter-2"], "a drafter may have to take the sequences of both verifiers"
    coordinator = starts["coordinator"]
    assert "--listen=127.0.0.1:7,unix:SOCKETS/coordinator" in coordinator
    assert "--verifiers=unix:SOCKETS/verifier-0,unix:SOCKETS/verifier-1" in coordinator
    table = "".join(config("show").stdout.split())
    assert "coordinator,startedbyitself" in table
    assert "specwireupstartsthese" in table
    assert "--listen=127.0.0.1:7,unix:SOCKETS/coordinator" in table


def test_show_names_a_coordinator_that_does_not_answer() -> None:
    result = config("show", "--address", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "127.0.0.1:1" in result.stderr


async def test_show_says_what_a_running_coordinator_has_clipped(socket_dir: Path) -> None:
    async with serve_cluster(socket_dir, k=99) as served:
        effective = await asyncio.to_thread(shown, "--address", served.address)
        tables = await asyncio.to_thread(config, "show", "--address", served.address)
    (clipped,) = effective["clipped_by_coordinator"]
    assert clipped.startswith("num_speculative_tokens clipped from 99 to")
    assert f"clipped by the running coordinator: {clipped}\n" in tables.stdout


@pytest.mark.usefixtures("hasty")
def test_commands_take_the_address_of_the_file(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*options: str) -> Result:
        return CliRunner().invoke(app, ["generate", "ABC", "--max-tokens", "2", *options])

    Path("specwire.yaml").write_text(f"client: {{address: '{coordinator.address}'}}\n")
    assert generate().stdout == "DE\n"
    monkeypatch.setenv("SPECWIRE_ADDRESS", "127.0.0.1:1")
    assert generate().exit_code == 1, "the environment goes before the file"
    assert generate("--address", coordinator.address).stdout == "DE\n"
    monkeypatch.delenv("SPECWIRE_ADDRESS")
    Path("other.yaml").write_text("client: {address: '127.0.0.1:2'}\n")
    monkeypatch.setenv("SPECWIRE_CONFIG", "other.yaml")
    assert client_defaults(typer.main.get_command(app))["bench"]["serve"] == {"address": "127.0.0.1:2"}
    for command in (["generate", "ABC"], ["status", "--once"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code != 0
        assert "127.0.0.1:2" in result.stderr, command
    Path("other.yaml").write_text("client: {adress: x}\n")
    result = generate()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "other.yaml:1: client.adress is an unknown key; did you mean address?" in result.stderr


def yaml_blocks(path: Path) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_documented_files_are_good() -> None:
    files = [*yaml_blocks(ROOT / "docs" / "configuration.md"), (ROOT / "examples" / "specwire.yaml").read_text(encoding="utf-8")]
    assert len(files) >= 3
    for text in files:
        Path("specwire.yaml").write_text(text)
        result = config("check")
        assert (result.exit_code, result.stdout) == (0, "specwire.yaml: no problems\n"), text


def test_documented_batch_lines_are_good() -> None:
    block = re.findall(r"^```json\n(.*?)^```", (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    jobs = list(read_jobs(block.encode().splitlines()))
    assert [(job.id, job.error) for job in jobs] == [("a", None), ("b", None), (3, None)]
    for job in jobs:
        make_params(None, job.sampling)


def test_speculation_is_shown_once_unless_services_differ() -> None:
    Path("specwire.yaml").write_text("speculative_config: {num_speculative_tokens: 3}\n")
    shown = config("show").stdout
    assert shown.count("prompt_lookup_min") == 1
    assert '--speculative-config={"num_speculative_tokens": 3}' in shown
    Path("specwire.yaml").write_text("coordinator: {speculative_config: {num_speculative_tokens: 3}}\n")
    shown = config("show").stdout
    assert shown.count("speculative_config.prompt_lookup_min") == 3


def test_options_that_the_method_does_not_read() -> None:
    Path("specwire.yaml").write_text("speculative_config: {method: suffix, num_speculative_tokens: 3, prompt_lookup_max: 7}\n")
    shown = config("show").stdout
    assert "clipped: prompt_lookup_max is 7, but suffix does not read it: leave it out, or use ngram" in " ".join(shown.split())


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_file_is_named_once(command: str, tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("{}\n")
    result = config(command, str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    assert (result.exit_code, "name one of them" in result.output) == (2, True), result.output
