"""`specwire config check`: every problem at once; and what reads the file."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from specwire.cli import app
from specwire.cli.batch_lines import read_jobs
from specwire.cli.sources import client_defaults
from specwire.client.arguments import make_params
from tests.cli.config_calls import FILE, config
from tests.cli.conftest import Coordinator

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("in_folder")


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


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_file_is_named_once(command: str, tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("{}\n")
    result = config(command, str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    assert (result.exit_code, "name one of them" in result.output) == (2, True), result.output
