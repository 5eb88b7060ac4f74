"""Service configuration: every field is a flag, flags rebuild the configuration, and bad ones are refused in one line."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.arguments import parse_flags
from specwire.config import Config, CoordinatorConfig, DrafterConfig, HttpConfig, VerifierConfig, flags
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.speculative_config import SpeculativeConfig

SERVICES = (VerifierConfig, DrafterConfig, CoordinatorConfig)
OTHER: dict[str, Any] = {
    "listen": ("unix:sw.sock", "0.0.0.0:0"),
    "verifiers": ("10.0.0.1:1", "unix:v"),
    "drafters": ("host.example:65535", "[::1]:7"),
    "model": "-a model, with = signs",
    "load_format": "dummy",
    "dtype": "float32",
    "weights": "int8",
    "device": "cuda:1",
    "gpu_memory_utilization": 0.5,
    "max_model_len": 2,
    "coordinator_id": "blue",
    "enable_prefix_caching": False,
    "adaptive_hysteresis": 0.125,
    "canary_config": '{"num_speculative_tokens": 2}',
    "canary_share": 0.5,
    "adaptive_probe_share": 0.0625,
    "metrics_listen": "127.0.0.1:9100",
    "min_draft_wait_ms": 0.25,
    "trace_endpoint": "https://collector.example:4317",
    "trace_sample_ratio": 0.25,
    "verifier_wait_s": 0.0,
    "tls_cert": "cert.pem",
    "tls_key": "key.pem",
    "tls_ca": "ca.pem",
    "tls_client_auth": True,
    "api_keys": "keys.yaml",
    "features": ("heads/a", "heads/b"),
    "share_features": "never",
    "feature_address": "10.0.0.1:7",
    "speculative_config": SpeculativeConfig(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=((1, 2, 3),)),
}

HEAD = SpeculativeConfig(method="eagle3", model="head")
RATIO = SpeculativeConfig(method="draft_model", model="draft", rejection_sample_method="probabilistic")
ADAPTIVE = SpeculativeConfig(enable_adaptive_verification=True)

DIFFERENT_WAYS = ({"weights"}, {"dtype", "device"})
"""Fields to leave out where all others are not their defaults: a format of weights has its own dtype and device."""


def other_value(field: "dataclasses.Field[Any]") -> Any:
    """A good value that is not the default, if there is one."""
    if field.metadata["instead"]:
        return field.default
    if field.name in OTHER:
        return OTHER[field.name]
    if isinstance(field.default, bool):
        return not field.default
    return field.default + 1 if isinstance(field.default, (int, float)) else f"{field.default}x"


@pytest.mark.parametrize("kind", SERVICES)
def test_defaults_need_no_flags(kind: type) -> None:
    assert flags(kind()) == []
    assert parse_flags(kind, "service", []) == kind()


@pytest.mark.parametrize("without", DIFFERENT_WAYS)
@pytest.mark.parametrize("kind", SERVICES)
def test_every_field_travels_as_a_flag(kind: type, without: set[str]) -> None:
    fields = [field for field in dataclasses.fields(kind) if field.name not in without]
    config = kind(**{field.name: other_value(field) for field in fields})
    assert len(flags(config)) == len([field for field in fields if not field.metadata["instead"]])
    assert parse_flags(kind, "service", flags(config)) == config


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--skip-tokenizer"], True),
        (["--skip-tokenizer=false"], False),
        (["--skip-tokenizer", "true"], True),
        (["--skip-tokenizer", "--model=m"], True),
    ],
)
def test_a_switch_needs_no_value(arguments: list[str], expected: bool) -> None:
    assert parse_flags(VerifierConfig, "service", arguments).skip_tokenizer is expected


def test_a_list_is_given_with_commas_or_flag_by_flag() -> None:
    expected = ("heads/a", "heads/b", "heads/c")
    for arguments in (["--features", "heads/a,heads/b", "--features=heads/c"], ["--features=heads/a, heads/b,heads/c"]):
        assert parse_flags(VerifierConfig, "service", arguments).features == expected


texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1)


@given(texts, st.integers(0, 2**40), st.booleans())
def test_any_value_survives(model: str, memory: int, prefix_caching: bool) -> None:
    config = VerifierConfig(model=model, kv_cache_memory=memory + 1, enable_prefix_caching=prefix_caching)
    assert parse_flags(VerifierConfig, "service", flags(config)) == config


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (VerifierConfig, {"max_num_seqs": 0}, "--max-num-seqs is 0, but must be a number from 1 to 100000 (most sequences open at once)"),
        (CoordinatorConfig, {"max_outstanding_rounds": 2**31}, "--max-outstanding-rounds is 2147483648, but must be a number from 1 to 2147483647"),
        (DrafterConfig, {"max_message_mb": 2048}, "--max-message-mb is 2048, but must be a number from 1 to 2047"),
        (CoordinatorConfig, {"coordinator_id": "\udcff"}, "--coordinator-id is '\\udcff', which is no UTF-8"),
        (CoordinatorConfig, {"verifiers": ("\udcff:1",)}, "--verifiers has '\\udcff:1', which is no UTF-8"),
        (VerifierConfig, {"num_threads": -1}, "--num-threads is -1"),
        (DrafterConfig, {"num_threads": 100_000}, "--num-threads is 100000"),
        (VerifierConfig, {"dtype": "float16"}, "--dtype is 'float16', but must be one of auto, float32, bfloat16"),
        (VerifierConfig, {"device": "tpu"}, "--device is 'tpu', but must be: cpu or cuda"),
        (VerifierConfig, {"load_format": "pickle"}, "--load-format is 'pickle', but must be one of auto, dummy"),
        (VerifierConfig, {"model": ""}, "--model is ''"),
        (VerifierConfig, {"listen": ()}, "--listen is empty"),
        (VerifierConfig, {"listen": ("50052",)}, "--listen has '50052', but must be unix:path or host:port"),
        (VerifierConfig, {"listen": ("localhost:70000",)}, "--listen has 'localhost:70000'"),
        (VerifierConfig, {"listen": ("localhost:http",)}, "--listen has 'localhost:http'"),
        (VerifierConfig, {"listen": ("http://localhost:1",)}, "--listen has 'http://localhost:1', but must be unix:path or host:port"),
        (VerifierConfig, {"listen": ("::1:50052",)}, "--listen has '::1:50052'"),
        (CoordinatorConfig, {"verifiers": ("dns:///a:1",)}, "--verifiers has 'dns:///a:1'"),
        (CoordinatorConfig, {"metrics_listen": "dns:///a:1"}, "--metrics-listen is 'dns:///a:1'"),
        (VerifierConfig, {"listen": ("unix:",)}, "whose path has 0 bytes"),
        (VerifierConfig, {"listen": ("unix:" + "x" * 108,)}, "whose path has 108 bytes"),
        (CoordinatorConfig, {"verifiers": ("a:0",)}, "--verifiers has 'a:0'"),
        (CoordinatorConfig, {"verifiers": ("a:1", "a:1")}, "--verifiers is 'a:1,a:1', which names an address twice"),
        (CoordinatorConfig, {"min_draft_wait_ms": float("nan")}, "--min-draft-wait-ms is nan"),
        (CoordinatorConfig, {"verifier_wait_s": float("inf")}, "--verifier-wait-s is inf"),
        (CoordinatorConfig, {"max_queue": 0}, "--max-queue is 0"),
        (DrafterConfig, {"prefill_chunk": 0}, "--prefill-chunk is 0"),
        (VerifierConfig, {"gpu_memory_utilization": 0}, "--gpu-memory-utilization is 0, but must be a number from 0.01 to 1"),
        (DrafterConfig, {"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5"),
        (VerifierConfig, {"kv_cache_memory": -1}, "--kv-cache-memory is -1"),
        (VerifierConfig, {"weights": "int4", "dtype": "float32"}, "--dtype is float32, but --weights is int4, which is computed in bfloat16"),
        (DrafterConfig, {"weights": "fp32", "device": "cuda:1"}, "--weights is fp32, but --device is cuda:1: formats are for CPUs"),
        (VerifierConfig, {"max_model_len": 1}, "--max-model-len is 1, but a prompt token and an output token need 2"),
        (CoordinatorConfig, {"half_batches_from": 8, "max_outstanding_rounds": 1}, "--half-batches-from is 8, but --max-outstanding-rounds is 1"),
        (CoordinatorConfig, {"half_batches_from": 8, "speculative_config": ADAPTIVE}, "--half-batches-from is 8, but adaptive verification"),
        (CoordinatorConfig, {"canary_config": '{"num_speculative_token": 2}'}, "--canary-config: speculative_config has the unknown key"),
        (CoordinatorConfig, {"canary_config": "[1"}, "--canary-config: speculative_config '[1' is no JSON"),
        (CoordinatorConfig, {"canary_config": "[" * 5000}, f"--canary-config: speculative_config '{'[' * 200}...' is no JSON"),
        (CoordinatorConfig, {"canary_config": f'{{"num_speculative_tokens": {"1" * 5000}}}'}, "is no JSON (Exceeds the limit"),
    ],
)
def test_bad_values_are_refused_by_name(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kind(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (DrafterConfig, {"weights": "int4", "speculative_config": HEAD}, "--weights is int4, but the method is eagle3"),
        (VerifierConfig, {"device": "cuda", "speculative_config": RATIO}, "--device is cuda, but captured rounds have no kernel of the ratio test"),
        (DrafterConfig, {"device": "cuda:1", "speculative_config": RATIO}, "--device is cuda:1, but captured drafting has no private noise"),
    ],
)
def test_values_that_do_not_go_together_are_refused_by_name(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        kind(**values)
    assert message in str(caught.value)


def test_values_that_go_together() -> None:
    """What only looks like those above."""
    ngram = SpeculativeConfig.from_dict({"rejection_sample_method": "probabilistic"})
    greedy = dataclasses.replace(RATIO, draft_sample_method="greedy")
    assert DrafterConfig(weights="int4", speculative_config=ngram).device == "cpu"
    assert DrafterConfig(weights="int4", speculative_config=RATIO).weights == "int4"
    assert [DrafterConfig(device="cuda", speculative_config=spec).device for spec in (ngram, greedy)] == ["cuda"] * 2
    assert VerifierConfig(weights="int4", speculative_config=HEAD).weights == "int4"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is 2, but only 1 is built; a model must fit on one device"),
        ({"pipeline_parallel_size": 4}, "--pipeline-parallel-size is 4, but only 1 is built"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is fp8, but only auto is built; leave it, and lower max_num_seqs or max_model_len"),
        ({"enable_lora": True}, "--enable-lora is true, but only false is built; merge the adapter into a checkpoint"),
    ],
)
def test_what_is_not_built_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        VerifierConfig(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "many"], "'many'"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--max-num-seq", "3"], "--max-num-seq 3; did you mean --max-num-seqs?"),
        (["--model"], "--model"),
        (["--enable-prefix-caching", "maybe"], "'maybe' is neither true nor false"),
        (["--speculative-config", "{"], "no JSON"),
        (["--speculative-config", '{"metod": "ngram"}'], "did you mean 'method'?"),
        (["--speculative-config", '{"method": "medusa"}'], "method 'medusa' is not built"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "num_speculative_tokens is 0"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is 2, but only 1 is built"),
        (["surplus"], "surplus"),
    ],
)
def test_bad_flags_end_with_one_line_and_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(VerifierConfig, "verifier_svc", arguments)
    assert caught.value.code == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("verifier_svc: ")
    assert stderr.count("\n") == 1
    assert stderr.endswith("\n")
    assert message in stderr


@pytest.mark.parametrize("kind", [VerifierConfig, DrafterConfig, CoordinatorConfig, HttpConfig])
def test_help_has_headings(kind: type[Config], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(kind, "service", ["--help"])
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert {"service:", "sizes and limits:", "metrics and traces:", "TLS and API keys:"} <= set(headings)
    assert len(headings) == len(set(headings))
    assert sum(line.startswith("  --") for line in lines) > len(dataclasses.fields(kind))


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(CoordinatorConfig, "coordinator", ["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(CoordinatorConfig):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "(default 127.0.0.1:50050)" in text
