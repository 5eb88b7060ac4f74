"""From `specwire up`'s options to the configuration of every service."""

import re
from pathlib import Path

import pytest

from specwire.cli.stack import StackOptions, plan_stack
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig, parse_flags
from specwire.errors import InvalidArgumentError
from specwire.speculative_config import SpeculativeConfig

FOLDER = Path("sockets")


def test_defaults() -> None:
    stack = plan_stack(StackOptions(), FOLDER, 50050)
    (verifier,), (drafter,) = stack.verifiers, stack.drafters
    assert verifier == VerifierConfig(listen=("unix:sockets/verifier-0",))
    assert (drafter.listen, drafter.speculative_config) == (("unix:sockets/drafter-0",), SpeculativeConfig())
    assert stack.coordinator == CoordinatorConfig(
        listen=("127.0.0.1:50050",), verifiers=("unix:sockets/verifier-0",), drafters=("unix:sockets/drafter-0",)
    )
    assert stack.address == "127.0.0.1:50050"


def test_every_option_reaches_its_services() -> None:
    speculative = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=3)
    options = StackOptions(
        model="target", load_format="dummy", dtype="float32", device="cuda:1", num_threads=3, max_model_len=99, max_num_seqs=5,
        max_num_batched_tokens=77, kv_cache_memory=1 << 20, num_verifiers=2, num_drafters=3, speculative_config=speculative,
    )  # fmt: skip
    stack = plan_stack(options, FOLDER, 1234)
    assert len(stack.verifiers) == 2
    for index, verifier in enumerate(stack.verifiers):
        assert verifier == VerifierConfig(
            listen=(f"unix:sockets/verifier-{index}",), model="target", load_format="dummy", dtype="float32", device="cuda:1", num_threads=3,
            max_model_len=99, max_num_seqs=5, max_num_batched_tokens=77, kv_cache_memory=1 << 20, speculative_config=speculative,
        )  # fmt: skip
    assert len(stack.drafters) == 3
    for index, drafter in enumerate(stack.drafters):
        assert drafter == DrafterConfig(
            listen=(f"unix:sockets/drafter-{index}",), load_format="dummy", dtype="float32", device="cuda:1", num_threads=3, max_num_seqs=10,
            kv_cache_memory=1 << 20, speculative_config=speculative,
        )  # fmt: skip
    assert len(stack.coordinator.verifiers) == 2
    assert len(stack.coordinator.drafters) == 3
    assert stack.coordinator.speculative_config == speculative


@pytest.mark.parametrize("options", [StackOptions(num_drafters=0), StackOptions(speculative_config=SpeculativeConfig(method=None))])
def test_plain_decoding_needs_no_drafter(options: StackOptions) -> None:
    stack = plan_stack(options, FOLDER, 1)
    assert stack.drafters == ()
    assert stack.coordinator.drafters == ()
    assert stack.coordinator.speculative_config.method is None
    assert [[spec.name for spec in group] for group in stack.groups()] == [["verifier"], ["coordinator"]]


@pytest.mark.parametrize(("num_verifiers", "num_cores", "num_threads"), [(1, 2, 0), (2, 2, 1), (2, 8, 4), (3, 2, 1)])
def test_verifiers_share_the_cores(num_verifiers: int, num_cores: int, num_threads: int) -> None:
    stack = plan_stack(StackOptions(num_verifiers=num_verifiers), FOLDER, 1, num_cores)
    assert {verifier.num_threads for verifier in stack.verifiers} == {num_threads}


def test_processes_get_their_configuration_as_flags() -> None:
    stack = plan_stack(StackOptions(num_verifiers=2, max_num_seqs=3), FOLDER, 1)
    groups = stack.groups()
    assert [[(spec.name, spec.module, spec.essential) for spec in group] for group in groups] == [
        [("verifier-0", "verifier_svc", False), ("verifier-1", "verifier_svc", False)],
        [("drafter", "drafter_svc", False)],
        [("coordinator", "coordinator", True)],
    ]
    assert parse_flags(VerifierConfig, "verifier", groups[0][1].arguments) == stack.verifiers[1]
    assert parse_flags(DrafterConfig, "drafter", groups[1][0].arguments) == stack.drafters[0]
    assert parse_flags(CoordinatorConfig, "coordinator", groups[2][0].arguments) == stack.coordinator
    assert [spec.address for group in groups for spec in group][-1] == "127.0.0.1:1"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "--port is 70000, but must be from 0 to 65535"),
        ({"num_verifiers": 0}, "--verifiers is 0, but must be from 1 to 64"),
        ({"num_drafters": -1}, "--drafters is -1, but must be from 0 to 64"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"dtype": "float16"}, "--dtype is 'float16'"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(values: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        StackOptions(**values)
