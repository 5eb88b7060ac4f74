"""`specwire config show`: what takes effect, from where, and what is clipped."""

import asyncio
from pathlib import Path

import pytest

from tests.cli.config_calls import FILE, config, shown
from tests.metrics.served import serve_cluster

pytestmark = pytest.mark.usefixtures("in_folder")


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
