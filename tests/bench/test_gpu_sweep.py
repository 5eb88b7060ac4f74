"""The sweep on a GPU: the call that it makes is one that `specwire sweep` takes, at both scales."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.gpu import sweep
from specwire.bench.sweep.options import SweepOptions
from specwire.bench.sweep.stacks import OwnStack
from specwire.cli import app


@pytest.mark.parametrize("scale", [sweep.FULL, sweep.SMALL])
def test_what_is_asked_for(scale: sweep.Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[SweepOptions, OwnStack]] = []

    def run(options: SweepOptions, lines: None, stack: OwnStack) -> int:
        asked.append((options, stack))
        return 0

    monkeypatch.setattr("specwire.bench.sweep.command.run_sweep", run)
    _, _, module, *arguments = sweep.command(scale, tmp_path, tmp_path / "out", "cpu")
    assert module == "specwire.cli"
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    [(options, stack)] = asked
    assert (options.concurrencies, options.fixed, stack.configured) == (scale.concurrency, scale.fixed, sweep.K)
    assert stack.check(()) == ("none", "fixed", "dynamic", "adaptive")
    verifier, [drafter] = stack._options.verifier, stack._options.drafters
    assert min(verifier.max_num_seqs, drafter.max_num_seqs) >= max(scale.concurrency)
    assert verifier.max_model_len > scale.input_len + scale.output_len
    assert stack._speculation.synthetic_acceptance_rates is not None


def test_small_figures_are_no_results() -> None:
    with pytest.raises(SystemExit, match="--tiny needs --out"):
        sweep.main(["--device", "cpu", "--tiny"])
    with pytest.raises(SystemExit, match="add --tiny"):
        sweep.main(["--device", "cpu"])
