"""From the file's sections and `specwire up`'s flags to the configuration of every service."""

import re
from pathlib import Path
from typing import Any

import pytest

from specwire.arguments import parse_flags
from specwire.config import CoordinatorConfig, DrafterConfig, HttpConfig, VerifierConfig
from specwire.config_file import read_config_file, read_override
from specwire.config_layers import ConfigError
from specwire.speculative_config import SpeculativeConfig
from specwire.stack.plan import StackOptions, plan_stack
from specwire.stack.resolve import resolve_stack

FOLDER = Path("sockets")


def options(*overrides: str, num_cores: int = 2) -> StackOptions:
    return resolve_stack([read_override(text) for text in overrides], num_cores)


@pytest.fixture
def from_file(tmp_path: Path) -> Any:
    def read(text: str, *overrides: str) -> StackOptions:
        (tmp_path / "specwire.yaml").write_text(text)
        return resolve_stack([read_config_file(tmp_path / "specwire.yaml"), *map(read_override, overrides)], num_cores=2)

    return read


def test_defaults() -> None:
    stack = plan_stack(options(), FOLDER)
    assert stack.verifiers == (VerifierConfig(listen=("unix:sockets/verifier-0",)),)
    assert stack.drafters == (DrafterConfig(listen=("unix:sockets/drafter-0",), max_num_seqs=16),)
    assert stack.coordinator == CoordinatorConfig(
        listen=("127.0.0.1:50050", "unix:sockets/coordinator"), verifiers=("unix:sockets/verifier-0",), drafters=("unix:sockets/drafter-0",)
    )
    assert stack.address == "127.0.0.1:50050"


def test_sections_reach_their_services(from_file: Any) -> None:
    """Any key of any section does, so that a new one needs no change here."""
    stack = plan_stack(
        from_file("""
speculative_config: {method: draft_model, model: draft, num_speculative_tokens: 3}
verifier: {model: target, dtype: float32, max_num_seqs: 5, num_kv_blocks: 7}
drafter: {device: "cuda:1", prefill_chunk: 9, speculative_config: {draft_sample_method: greedy}}
coordinator: {max_queue: 11, verifier_wait_s: 2}
up: {verifiers: 2, drafters: 3, port: 1234}
"""),
        FOLDER,
    )
    speculative = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=3)
    greedy = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=3, draft_sample_method="greedy")
    assert stack.verifiers == tuple(
        VerifierConfig(
            (f"unix:sockets/verifier-{index}",), model="target", dtype="float32", max_num_seqs=5, num_kv_blocks=7, num_threads=1,
            speculative_config=speculative,
        )
        for index in range(2)
    )  # fmt: skip
    assert stack.drafters == tuple(
        DrafterConfig(
            (f"unix:sockets/drafter-{index}",), device="cuda:1", prefill_chunk=9, max_num_seqs=10, gpu_memory_utilization=0.3,
            speculative_config=greedy,
        )
        for index in range(3)
    )  # fmt: skip
    assert stack.coordinator == CoordinatorConfig(
        ("127.0.0.1:1234", "unix:sockets/coordinator"), ("unix:sockets/verifier-0", "unix:sockets/verifier-1"),
        ("unix:sockets/drafter-0", "unix:sockets/drafter-1", "unix:sockets/drafter-2"),
        max_queue=11, verifier_wait_s=2.0, speculative_config=speculative,
    )  # fmt: skip


def test_drafters_may_mix_methods_and_devices(from_file: Any) -> None:
    text = """
speculative_config: {num_speculative_tokens: 4}
drafter: {num_threads: 1, dtype: float32}
drafters:
  - {method: ngram, prompt_lookup_max: 6, prompt_lookup_min: 3, count: 2}
  - {model: draft, device: cuda, num_threads: 3, num_speculative_tokens: 2}
"""
    drafters = from_file(text).drafters
    ngram = DrafterConfig(num_threads=1, dtype="float32", max_num_seqs=16).speculative_config
    assert [config.speculative_config.method for config in drafters] == ["ngram", "ngram", "draft_model"]
    assert (drafters[0].num_threads, drafters[0].device, drafters[0].dtype) == (1, "cpu", "float32")
    assert (drafters[0].speculative_config.prompt_lookup_min, drafters[0].speculative_config.prompt_lookup_max) == (3, 6)
    assert (drafters[2].num_threads, drafters[2].device, drafters[2].dtype) == (3, "cuda", "float32")
    assert drafters[2].speculative_config.model == "draft"
    assert [config.speculative_config.num_speculative_tokens for config in drafters] == [4, 4, 2]
    assert from_file(text).coordinator.speculative_config == SpeculativeConfig(num_speculative_tokens=4)
    assert ngram.method == "ngram"
    assert [spec.name for group in plan_stack(from_file(text), FOLDER).groups() for spec in group] == [
        "verifier", "drafter-0", "drafter-1", "drafter-2", "coordinator", "http",
    ]  # fmt: skip
    assert from_file(text, "drafters=[{method: ngram}]").drafters == (from_file(text, "drafters=[{}]").drafters)
    assert [config.device for config in from_file(text, "drafter.device=cpu").drafters] == ["cpu"] * 3, "the stronger source wins"
    assert from_file(text, "up.drafters=0").drafters == ()


@pytest.mark.parametrize("override", ["up.drafters=0", "speculative_config.method=null", "drafter.speculative_config.method=null"])
def test_plain_decoding_needs_no_drafter(override: str) -> None:
    stack = plan_stack(options(override), FOLDER)
    assert stack.drafters == ()
    assert stack.coordinator.drafters == ()
    assert stack.coordinator.speculative_config.method is None
    assert stack.verifiers[0].speculative_config.method is None
    assert [[spec.name for spec in group] for group in stack.groups()] == [["verifier"], ["coordinator"], ["http"]]


@pytest.mark.parametrize(("num_verifiers", "num_cores", "num_threads"), [(1, 2, 0), (2, 2, 1), (2, 8, 4), (3, 2, 1)])
def test_verifiers_share_the_cores(num_verifiers: int, num_cores: int, num_threads: int) -> None:
    assert options(f"up.verifiers={num_verifiers}", num_cores=num_cores).verifier.num_threads == num_threads
    assert options(f"up.verifiers={num_verifiers}", "verifier.num_threads=5", num_cores=num_cores).verifier.num_threads == 5


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("", (0.9, 0.9)),  # other devices, or none
        ("verifier: {device: cuda}", (0.9, 0.9)),
        ("verifier: {device: cuda}\ndrafter: {device: 'cuda:1'}", (0.9, 0.9)),
        ("verifier: {device: cuda}\ndrafter: {device: 'cuda:0'}", (0.72, 0.18)),
        ("verifier: {device: cuda}\ndrafter: {device: cuda}\nup: {drafters: 2}", (0.6, 0.15, 0.15)),
        ("verifier: {device: cuda}\ndrafter: {device: cuda, gpu_memory_utilization: 0.25}", (0.65, 0.25)),
        ("verifier: {device: cuda, gpu_memory_utilization: 0.5}\ndrafter: {device: cuda, gpu_memory_utilization: 0.4}", (0.5, 0.4)),
        ("verifier: {device: cuda}\ndrafter: {device: cuda}\nup: {drafters: 0}", (0.9,)),
        ("verifier: {device: cuda}\nup: {verifiers: 2}", (0.45, 0.9)),
        ("verifier: {device: cuda}\ndrafters: [{method: ngram, device: cuda}]", (0.9, 0.9)),  # ngram has nothing there
        ("verifier: {device: cuda}\ndrafters: [{model: d, device: cuda}, {model: d, device: 'cuda:1'}]", (0.72, 0.18, 0.9)),
    ],
)
def test_services_on_one_gpu_share_its_memory(from_file: Any, text: str, shares: tuple[float, ...]) -> None:
    stack = from_file(f"speculative_config: {{model: draft}}\n{text}\n")
    assert (stack.verifier.gpu_memory_utilization, *(each.gpu_memory_utilization for each in stack.drafters)) == pytest.approx(shares)


@pytest.mark.parametrize("share", [0.895, 1.0])
def test_a_share_that_leaves_nothing_for_others_is_refused(from_file: Any, share: float) -> None:
    text = f"speculative_config: {{model: d}}\nverifier: {{device: cuda, gpu_memory_utilization: {share}}}\ndrafter: {{device: 'cuda:0'}}"
    with pytest.raises(ConfigError, match=rf"the 2 processes on GPU 0 were given {share:g} of its memory in all, .*; lower gpu_memory_utilization"):
        from_file(text)


@pytest.mark.parametrize(
    ("overrides", "listen"),
    [
        ([], ("127.0.0.1:50050",)),
        (["up.port=7"], ("127.0.0.1:7",)),
        (["coordinator.listen=0.0.0.0:8,unix:c"], ("0.0.0.0:8", "unix:c")),
        (["coordinator.listen=0.0.0.0:8", "up.port=7"], ("127.0.0.1:7",)),
    ],
)
def test_where_clients_call(overrides: list[str], listen: tuple[str, ...]) -> None:
    assert options(*overrides).coordinator.listen == listen


def test_processes_get_their_configuration_as_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = plan_stack(options("up.verifiers=2", "verifier.max_num_seqs=3"), FOLDER)
    groups = stack.groups()
    assert [[(spec.name, spec.module, spec.essential) for spec in group] for group in groups] == [
        [("verifier-0", "verifier_svc", False), ("verifier-1", "verifier_svc", False)],
        [("drafter", "drafter_svc", False)],
        [("coordinator", "coordinator", True)],
        [("http", "specwire.http", False)],
    ]
    assert not any(spec.essential for group in stack.groups(restarts_coordinator=True) for spec in group)
    monkeypatch.setenv("SPECWIRE_CONFIG", "no-such-file")  # theirs are complete
    assert parse_flags(VerifierConfig, "verifier", groups[0][1].arguments) == stack.verifiers[1]
    assert parse_flags(DrafterConfig, "drafter", groups[1][0].arguments) == stack.drafters[0]
    assert parse_flags(CoordinatorConfig, "coordinator", groups[2][0].arguments) == stack.coordinator
    assert parse_flags(HttpConfig, "http", groups[3][0].arguments) == stack.http
    assert [spec.address for group in groups for spec in group][-2:] == ["unix:sockets/coordinator", "unix:sockets/http"]


def test_http_calls_the_coordinator_of_the_stack() -> None:
    http = plan_stack(options(), FOLDER).http
    assert http == HttpConfig(listen=("127.0.0.1:8000",), coordinator="unix:sockets/coordinator", health_listen="unix:sockets/http")
    assert plan_stack(options("up.http=false"), FOLDER).http is None
    http = plan_stack(options("http.listen=0.0.0.0:9", "http.processes=2", "http.metrics_listen=h:9"), FOLDER).http
    assert http is not None
    assert (http.listen, http.processes, http.metrics_listen) == (("0.0.0.0:9",), 2, "h:10")
    http = plan_stack(options("http.listen=0.0.0.0:9", "up.http_port=7"), FOLDER).http
    assert http is not None
    assert http.listen == ("127.0.0.1:7",)


def test_metrics_ports_follow_each_other() -> None:
    everywhere = [f"{section}.metrics_listen=127.0.0.1:9000" for section in ("verifier", "drafter", "coordinator")]
    stack = plan_stack(options(*everywhere, "up.verifiers=2", "up.port=9003"), FOLDER)
    configs = [*stack.verifiers, *stack.drafters, stack.coordinator]
    assert [config.metrics_listen.rpartition(":")[2] for config in configs] == ["9000", "9001", "9002", "9004"], "9003 is the clients'"
    stack = plan_stack(options("verifier.metrics_listen=h:0", "up.verifiers=2", "drafter.metrics_listen=h:7", "up.drafters=2"), FOLDER)
    assert [config.metrics_listen for config in stack.verifiers + stack.drafters] == ["h:0", "h:0", "h:7", "h:8"]
    assert stack.coordinator.metrics_listen == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["up.port=70000"], "--set: up.port is 70000, but must be a number from 0 to 65535"),
        (["up.verifiers=0"], "up.verifiers is 0, but must be a number from 1 to 64"),
        (["up.drafters=-1"], "up.drafters is -1, but must be a number from 0 to 64"),
        (["verifier.max_num_seqs=0"], "verifier.max_num_seqs is 0"),
        (["verifier.dtype=float16"], "verifier.dtype is 'float16'"),
        (["drafters=[{}]", "up.drafters=2"], "up.drafters is 2, but `drafters` lists them"),
        (["drafters=[{count: 40}, {count: 25}]"], "drafters are 65 in all, but must be at most 64"),
        (["drafters=[{count: 65}]"], "drafters[0].count is 65, but must be a number from 1 to 64"),
        (["drafters=[{method: draft_model}]"], "drafters[0].method is draft_model, but model is not set"),
        (["speculative_config.method=null", "drafters=[{}]"], "an entry has no method"),
        (["verifiers.model=x"], "verifiers is an unknown key; did you mean verifier?"),
        (["verifier.modle=x"], "verifier.modle is an unknown key; did you mean model?"),
        (["verifier.tensor_parallel_size=2"], "verifier.tensor_parallel_size is 2, but only 1 is built; a model must fit on one device"),
        (["verifier.enable_lora=true"], "verifier.enable_lora is true, but only false is built"),
        (["verifier"], "'verifier' is not SECTION.KEY=VALUE"),
        (["verifier.model"], "'verifier.model' is not SECTION.KEY=VALUE"),
        (["verifier.max_num_seqs={"], "is no YAML"),
        (["verifier.max_num_seqs="], "verifier.max_num_seqs is empty, but must be an integer"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        options(*overrides)


def test_drafters_that_share_parts_of_the_target_are_told_which_it_is(from_file: Any) -> None:
    stack = plan_stack(
        from_file("""\
verifier: {model: target}
drafters:
- {method: eagle3, model: head}
- {method: eagle3, model: head, target_model: other}
- {method: draft_model, model: draft, use_heterogeneous_vocab: true}
- {method: draft_model, model: draft}
- {method: mtp}
- {method: [ngram, eagle3], model: head}
"""),
        FOLDER,
    )
    assert [each.target_model for each in stack.drafters] == ["target", "other", "target", "", "target", "target"]
