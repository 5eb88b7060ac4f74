"""What `specwire canary` shows of base and canary, and what it says without a coordinator and of wrong arguments."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specwire.cli import app
from specwire.cli.canary import make_variants_table
from specwire.messages import VariantStatus


def shown(*variants: VariantStatus) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    console.print(make_variants_table(variants))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def variant(name: str, share: float, method: str, adaptive: str, **counts: float) -> VariantStatus:
    config = f'{{"num_speculative_tokens": 5, "method": {method}, "enable_adaptive_verification": {adaptive}}}'
    return VariantStatus(name, share, config, "[[1, 16, 5]]", **counts)  # type: ignore[arg-type]


def test_only_what_differs_has_a_column_and_nothing_is_not_zero() -> None:
    lines = shown(variant("base", 0.9, '"ngram"', "false"), variant("canary", 0.1, '"ngram"', "true"))
    assert any(line.startswith("variant adaptive K by batch size share") for line in lines)
    assert "base false [[1, 16, 5]] 90% 0 0 0 0 – – –" in lines
    assert "canary true [[1, 16, 5]] 10% 0 0 0 0 – – –" in lines


def test_methods_and_figures() -> None:
    lines = shown(
        variant("base", 0.0, '"ngram"', "false"),
        variant("canary", 0.0, '["ngram", "suffix"]', "false", num_requests=2, num_ended=2, num_drafts=4, num_accepted_tokens=4, token_ms=3.5),
    )
    assert "canary ngram+suffix [[1, 16, 5]] – 2 2 0 0 2.00 – 3.50 ms" in lines


@pytest.mark.parametrize("arguments", [["start", '{"num_speculative_tokens": 1}'], ["share", "5"], ["promote"], ["rollback"], ["status"]])
def test_without_a_coordinator_it_says_how_to_start_one(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["canary", *arguments, "--address", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "127.0.0.1:1" in result.stderr
    assert "(`specwire up` starts one on this machine, --address names another)" in result.stderr


@pytest.mark.parametrize(("config", "message"), [("k=3", "is no JSON"), ('{"num_speculative_token": 3}', "did you mean 'num_speculative_tokens'?")])
def test_what_is_no_configuration_is_a_wrong_argument(config: str, message: str) -> None:
    result = CliRunner().invoke(app, ["canary", "start", config, "--address", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
