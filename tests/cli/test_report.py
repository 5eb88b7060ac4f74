"""What `specwire up` says about the running services."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from specwire.cli.report import name_drafts, print_report
from specwire.config_file import read_override
from specwire.messages import ServiceDescription
from specwire.stack.plan import StackOptions, plan_stack
from specwire.stack.resolve import resolve_stack

VERIFIER = ServiceDescription(
    "target", "v", 100, max_model_len=2048, max_num_draft_tokens=5, max_num_seqs=16, dtype="bfloat16", device="cpu", block_size=16, num_blocks=128,
    max_num_batched_tokens=512,
)  # fmt: skip
DRAFTER = ServiceDescription("lookup", "d", 0, max_model_len=2**31 - 1, max_num_draft_tokens=5, max_num_seqs=64, method="ngram")
SCHEDULE = [[1, 8, 7], [9, 12, 2], [20, 40, 1]]


def options(*overrides: str) -> StackOptions:
    return resolve_stack([read_override(text) for text in overrides])


def report(wanted: StackOptions, verifier: ServiceDescription = VERIFIER, drafter: ServiceDescription = DRAFTER) -> list[str]:
    stack = plan_stack(wanted, Path("sockets"))
    console = Console(file=io.StringIO(), width=100)
    print_report(console, stack, [verifier] * len(stack.verifiers), [drafter] * len(stack.drafters))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    return [" ".join(line.split()) for line in text.splitlines()]


def test_report_of_the_default_stack() -> None:
    lines = report(options())
    for line in (
        "coordinator 127.0.0.1:50050 clients call here",
        "verifier unix:sockets/verifier-0 target bfloat16 on cpu",
        "drafter unix:sockets/drafter-0 ngram lookup",
        "max_model_len 2048",
        "max_num_seqs 16",
        "KV cache 128 blocks of 16 tokens",
        "method ngram",
        "num_speculative_tokens 5",
        "prompt_lookup_min, prompt_lookup_max 2, 4",
        "rejection_sample_method strict",
        "1-16 5",
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith("clipped")]


def test_schedule_is_shown_as_it_takes_effect() -> None:
    lines = report(options(f"speculative_config.num_speculative_tokens_per_batch_size={SCHEDULE}"))
    start = lines.index("1-8 5")
    assert lines[start : start + 2] == ["1-8 5", "9-16 2"]
    assert "clipped: [1, 8, 7]: K clipped to num_speculative_tokens = 5" in lines
    assert "clipped: [20, 40, 1]: unused, since max_num_seqs is 16" in lines


def test_smaller_capacities_are_named() -> None:
    verifier = replace(VERIFIER, num_blocks=64, max_model_len=1500, max_num_draft_tokens=3, max_num_batched_tokens=8)
    lines = report(options("verifier.max_model_len=4096"), verifier, replace(DRAFTER, max_model_len=1000))
    assert [line.removeprefix("clipped: ") for line in lines if line.startswith("clipped")] == [
        "max_model_len clipped from 4096 to 1500: KV cache or message size hold no more",
        "max_model_len clipped from 1500 to 1024: the KV cache holds no longer sequence",
        "max_num_seqs clipped from 16 to 8: each takes a token of max_num_batched_tokens",
        "num_speculative_tokens clipped from 5 to 3: a verifier takes no more",
        "drafting ends at 1000 of 1024 tokens: the drafter's window is shorter",
    ]
    for line in ("max_model_len 1024", "max_num_seqs 8", "num_speculative_tokens 3", "1-8 3"):
        assert line in lines


def test_plain_decoding_has_no_schedule() -> None:
    lines = report(options("up.drafters=0"))
    assert "method none: plain decoding" in lines
    assert not [line for line in lines if line.startswith("schedule")]


def test_what_was_asked_for_is_shown() -> None:
    lines = report(options("speculative_config.enable_adaptive_verification=true"), replace(VERIFIER, weights="int4"))
    assert "enable_adaptive_verification true" in lines
    assert "verifier unix:sockets/verifier-0 target int4 weights, bfloat16 on cpu" in lines
    assert not [line for line in report(options()) if line.startswith("enable_adaptive_verification")]


def test_a_method_is_named_once() -> None:
    assert name_drafts("ngram", "ngram-2-4") == "ngram-2-4"
    assert name_drafts("ngram+suffix", "ngram-2-4+suffix-24") == "ngram-2-4+suffix-24"
    assert name_drafts("draft_model", "tiny") == "draft_model tiny"
    assert name_drafts("eagle3", "runs/head") == "eagle3 runs/head"
    assert name_drafts("ngram", "") == "ngram"
    assert name_drafts("", "") == ""
