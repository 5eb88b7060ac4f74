"""specwire.yaml: what takes effect and where it came from, and which values are refused."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from specwire.arguments import flags_layer, parse_flags, speculative_flag
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig
from specwire.config_file import find_config_file, read_config_file
from specwire.config_layers import ConfigError, Source, resolve
from specwire.config_reader import SECTIONS
from specwire.errors import InvalidArgumentError
from specwire.speculative_config import SpeculativeConfig
from tests.test_config import DIFFERENT_WAYS, other_value

FULL = """\
speculative_config:
  method: draft_model
  model: shared-draft
  num_speculative_tokens: 4
verifier:
  max_num_seqs: 8
  listen: [127.0.0.1:1, "unix:v"]
  enable-prefix-caching: false
drafter:
  listen: 127.0.0.1:2, unix:d
  speculative_config:
    method: ngram
    prompt_lookup_max: 7
coordinator:
  verifier_wait_s: 3
  speculative_config: {num_speculative_tokens: 2}
"""


@pytest.mark.parametrize(
    ("section", "key", "value", "origin"),
    [
        ("verifier", "max_num_seqs", 8, "specwire.yaml:6"),
        ("verifier", "listen", ("127.0.0.1:1", "unix:v"), "specwire.yaml:7"),
        ("verifier", "enable_prefix_caching", False, "specwire.yaml:8"),
        ("verifier", "max_num_batched_tokens", 512, "default"),
        ("verifier", "speculative_config.method", "draft_model", "specwire.yaml:2"),
        ("verifier", "speculative_config.num_speculative_tokens", 4, "specwire.yaml:4"),
        ("drafter", "listen", ("127.0.0.1:2", "unix:d"), "specwire.yaml:10"),
        ("drafter", "speculative_config.method", "ngram", "specwire.yaml:12"),
        ("drafter", "speculative_config.model", None, "default"),
        ("drafter", "speculative_config.prompt_lookup_max", 7, "specwire.yaml:13"),
        ("drafter", "speculative_config.prompt_lookup_min", 7, "specwire.yaml:13"),
        ("drafter", "speculative_config.num_speculative_tokens", 4, "specwire.yaml:4"),
        ("coordinator", "verifier_wait_s", 3.0, "specwire.yaml:15"),
        ("coordinator", "speculative_config.num_speculative_tokens", 2, "specwire.yaml:16"),
        ("coordinator", "speculative_config.model", "shared-draft", "specwire.yaml:3"),
        ("up", "port", 50050, "default"),
    ],
)
def test_values_and_their_origins(write_config: Any, section: str, key: str, value: Any, origin: str) -> None:
    resolved = resolve(SECTIONS[section], section, [read_config_file(write_config(FULL))])
    holder, _, name = key.rpartition(".")
    assert (getattr(resolved.config.speculative_config if holder else resolved.config, name), resolved.origins[key]) == (value, origin)


def test_flags_win_over_the_file(write_config: Any) -> None:
    given = {"max_num_seqs": 3, "speculative_config": {"num_speculative_tokens": 6}}
    resolved = resolve(VerifierConfig, "verifier", [read_config_file(write_config(FULL)), Source({"verifier": flags_layer(given)})])
    assert (resolved.config.max_num_seqs, resolved.origins["max_num_seqs"]) == (3, "--max-num-seqs")
    assert resolved.config.listen == ("127.0.0.1:1", "unix:v")
    speculative = resolved.config.speculative_config
    assert (speculative.model, speculative.num_speculative_tokens) == ("shared-draft", 6)
    assert resolved.origins["speculative_config.num_speculative_tokens"] == "--speculative-config"


@pytest.mark.parametrize("without", DIFFERENT_WAYS)
@pytest.mark.parametrize("kind", [VerifierConfig, DrafterConfig, CoordinatorConfig])
def test_every_key_round_trips(write_config: Any, kind: type, without: set[str]) -> None:
    """A file with every field of a section gives what the flags give."""
    config = kind(**{field.name: other_value(field) for field in dataclasses.fields(kind) if field.name not in without})
    plain = {field.name: getattr(config, field.name) for field in dataclasses.fields(kind) if field.name != "speculative_config"}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
    speculative = {key: value for key, value in dataclasses.asdict(config.speculative_config).items() if value is not None}
    speculative["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in speculative["num_speculative_tokens_per_batch_size"]]
    section = kind.__name__.removesuffix("Config").lower()
    write_config(yaml.safe_dump({section: plain | {"speculative_config": speculative}}))
    assert parse_flags(kind, section, ["--config", "specwire.yaml"]) == config
    assert parse_flags(kind, section, ["--config=specwire.yaml", "--max-message-mb=9"]) == dataclasses.replace(config, max_message_mb=9)


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        ({"model": "a"}, {"num_speculative_tokens": 2}, SpeculativeConfig("draft_model", "a", 2)),
        ({"model": "a"}, {"method": "ngram"}, SpeculativeConfig()),
        ({"model": "a"}, {"method": None}, SpeculativeConfig(None)),
        ({"model": "a"}, {"model": "b"}, SpeculativeConfig("draft_model", "b")),
        ({"model": "a"}, {"method": "draft_model"}, SpeculativeConfig("draft_model", "a")),
        ({"method": "ngram"}, {"model": "b"}, SpeculativeConfig("draft_model", "b")),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 6}, {"prompt_lookup_max": 3}, SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=3)),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2},
            {"synthetic_acceptance_rate": 0.5},
            SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_length=3.5),
        ),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}, {"rejection_sample_method": "standard"}, SpeculativeConfig()),
        ({"num_speculative_tokens": 3}, {"num_speculative_tokens": None}, SpeculativeConfig()),
    ],
)
def test_speculation_is_overridden_by_key(lower: dict[str, Any], upper: dict[str, Any], expected: SpeculativeConfig) -> None:
    sources = [Source(shared=speculative_flag(lower)), Source(shared=speculative_flag(upper))]
    assert resolve(VerifierConfig, "verifier", sources).config.speculative_config == expected


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "verifier:\n  max_num_seqs: 0\n  dtype: int3\n  listen: [x]\n",
            [
                "specwire.yaml:2: verifier.max_num_seqs is 0, but must be a number from 1 to 100000 (most sequences open at once)",
                "specwire.yaml:3: verifier.dtype is 'int3', but must be one of auto, float32, bfloat16",
                "specwire.yaml:4: verifier.listen has 'x', but must be unix:path or host:port with a port from 0 to 65535",
            ],
        ),
        ("verifier: {listen: []}\n", ["specwire.yaml:1: verifier.listen is empty; give at least one address, host:port or unix:path"]),
        (
            "speculative_config:\n  num_speculative_tokens: 0\n  method: medusa\n  draft_sample_method: x\n",
            [
                "specwire.yaml:2: speculative_config.num_speculative_tokens is 0, but must be an integer from 1 to 128",
                "specwire.yaml:3: speculative_config.method 'medusa' is not built; use one of ngram, draft_model",
                "specwire.yaml:4: speculative_config.draft_sample_method is 'x', but must be probabilistic or greedy",
            ],
        ),
        (
            "speculative_config:\n  num_speculative_tokens_per_batch_size: [[2, 3, 1]]\n",
            ["specwire.yaml:2: speculative_config.num_speculative_tokens_per_batch_size starts at batch size 2, but the first range must start at 1"],
        ),
        (
            "speculative_config:\n  rejection_sample_method: synthetic\n  synthetic_acceptance_rates: [0.5]\n",
            ["specwire.yaml:3: speculative_config.synthetic_acceptance_rates has 1 entries, but num_speculative_tokens is 5"],
        ),
        (
            "speculative_config:\n  draft_tensor_parallel_size: 2\n  tensor_parallel_size: 2\n  parallel_drafting: false\n",
            [
                "specwire.yaml:2: speculative_config.draft_tensor_parallel_size is 2, but that is not built; a drafter runs on one device",
                "specwire.yaml:3: speculative_config.tensor_parallel_size is 2, but there is no such key here; that of drafts would be",
            ],
        ),
        (
            "verifier:\n  speculative_config: {method: draft_model}\n",
            ["specwire.yaml:2: verifier.speculative_config.method is draft_model, but model is not set"],
        ),
        ("verifier:\n  max_num_seqs: 8\n  tls_cert: x\n", ["specwire.yaml:3: verifier.tls_cert is given without verifier.tls_key"]),
        (
            "verifier:\n  max_num_seqs: 0\n  tls_client_auth: true\n",
            ["specwire.yaml:2: verifier.max_num_seqs is 0", "specwire.yaml:3: verifier.tls_client_auth is true, which needs verifier.tls_cert and"],
        ),
    ],
)
def test_bad_values_are_all_named(write_config: Any, text: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(VerifierConfig, "verifier", [read_config_file(write_config(text))])
    found = [str(problem) for problem in caught.value.problems]
    assert len(found) == len(problems), found
    for line, problem in zip(found, problems, strict=True):
        assert line.startswith(problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "missing.yaml"], "there is no configuration file missing.yaml; correct the name"),
        (["--config", "bad.yaml"], "bad.yaml:2: verifier.max_num_seqs is 0, but must be a number"),
        (["--config", "bad.yaml"], "(and 1 more; `specwire config check bad.yaml` lists all)"),
        (["--config", "good.yaml", "--speculative-config", '{"method": "draft_model"}'], "--speculative-config method is draft_model, but model"),
    ],
)
def test_services_refuse_a_bad_file_in_one_line(write_config: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_config("verifier:\n  max_num_seqs: 0\n  dtype: x\n", "bad.yaml")
    write_config("verifier: {max_num_seqs: 2}\n", "good.yaml")
    with pytest.raises(SystemExit) as caught:
        parse_flags(VerifierConfig, "verifier_svc", arguments)
    stdout, stderr = capsys.readouterr()
    assert (caught.value.code, stdout, stderr.count("\n")) == (2, "", 1)
    assert message in stderr


def test_which_file_is_read(write_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config_file(None, in_folder=True) is None
    write_config("verifier: {max_num_seqs: 1}\n")
    write_config("verifier: {max_num_seqs: 2}\n", "other.yaml")
    assert find_config_file(None, in_folder=True) == Path("specwire.yaml")
    assert find_config_file(None, in_folder=False) is None
    assert find_config_file("", in_folder=True) is None
    assert parse_flags(VerifierConfig, "verifier", []).max_num_seqs == 16, "python -m reads a file only if it is named"
    monkeypatch.setenv("SPECWIRE_CONFIG", "other.yaml")
    assert parse_flags(VerifierConfig, "verifier", []).max_num_seqs == 2
    assert parse_flags(VerifierConfig, "verifier", ["--config=specwire.yaml"]).max_num_seqs == 1
    assert parse_flags(VerifierConfig, "verifier", ["--config="]).max_num_seqs == 16
    monkeypatch.setenv("SPECWIRE_CONFIG", "gone.yaml")
    with pytest.raises(InvalidArgumentError, match=re.escape("no configuration file gone.yaml (SPECWIRE_CONFIG names it)")):
        find_config_file(None, in_folder=True)


@pytest.mark.parametrize("text", ["", "# nothing\n", "verifier:\n", "verifier: {}\nspeculative_config:\n", "---\n"])
def test_an_empty_file_changes_nothing(write_config: Any, text: str) -> None:
    assert resolve(VerifierConfig, "verifier", [read_config_file(write_config(text))]).config == VerifierConfig()
