"""What is found, in words and as a piece of specwire.yaml."""

from pathlib import Path

import numpy as np
import pytest

from specwire.advise.advice import Advice, Measured, make_advice
from specwire.advise.configuration import config_file, speculative_keys
from specwire.advise.picture import draw
from specwire.advise.report import print_steps
from specwire.advise.steps import StepPoint, StepTimes
from specwire.advise.verdict import Decision, Verdict
from specwire.bench.acceptance import Acceptance, AcceptReport, PositionRates
from specwire.config import VerifierConfig
from specwire.config_file import read_config_file
from specwire.config_layers import resolve
from specwire.console import make_console
from specwire.messages import SpecStats, VerifyCost
from specwire.policy.cost import StepCost
from specwire.speculative_config import SpeculativeConfig
from tests.advise.test_decision import of_rate, times


def measured(rate: float = 0.8, *, step_times: StepTimes | None = None, survival: np.ndarray | None = None, **changes: object) -> Measured:
    values = {
        "model_id": "tiny", "method": "draft_model", "max_num_seqs": 64, "drafts": of_rate(rate),
        "survival": np.tile(rate ** np.arange(1, 8), (50, 1)) if survival is None else survival, "times": step_times or times(),
        "points": (StepPoint(1, 0, 0.0, 0.0, 8.0, 0), StepPoint(16, 7, 1.0, 7.0, 18.0, 0, 0.04)),
    }  # fmt: skip
    return Measured(**values | changes)  # type: ignore[arg-type]


def speculative(piece: str, folder: Path) -> SpeculativeConfig:
    """What the services make of it."""
    path = folder / "specwire.yaml"
    path.write_text(piece, encoding="utf-8")
    return resolve(VerifierConfig, "verifier", [read_config_file(path)]).config.speculative_config


def followed(verdict: Verdict, found: Measured, advice: Advice, folder: Path, k: int = 3) -> SpeculativeConfig:
    """What services make of a decision's configuration."""
    keys = speculative_keys(Decision(verdict, k, ("said",)), advice, found.most)
    return speculative(config_file(keys, ["said"]), folder)


def test_dynamic_k(tmp_path: Path) -> None:
    found = measured()
    advice = make_advice(found, 0.02, 7)
    assert not advice.is_off
    assert not advice.use_adaptive
    assert advice.headline.startswith(f"K = {advice.k_at(1)} for 1 to ")
    assert advice.gain_at(1) > 1.0
    config = followed(Verdict.DYNAMIC, found, advice, tmp_path)
    assert config.num_speculative_tokens_per_batch_size == advice.schedule
    assert config.num_speculative_tokens == max(k for _, _, k in advice.schedule)
    assert not config.enable_adaptive_verification
    assert any("K = 7 is the largest" in note for note in advice.notes)
    assert any("beyond, their times are those of the services' tables" in note for note in advice.notes)


@pytest.mark.parametrize("verdict", [Verdict.ON, Verdict.WEIGH])
def test_one_k_needs_no_schedule(verdict: Verdict, tmp_path: Path) -> None:
    found = measured()
    config = followed(verdict, found, make_advice(found, 0.02, 7), tmp_path, k=4)
    assert (config.num_speculative_tokens, config.num_speculative_tokens_per_batch_size) == (4, None)


def test_leave_it_off(tmp_path: Path) -> None:
    found = measured(0.05)
    advice = make_advice(found, 0.02, 7)
    assert advice.is_off
    size, k, gain = advice.best_gain()
    assert gain < 0.02
    assert advice.headline == f"leave speculation off: the best that drafts do is {gain:+.1%} (K = {k} at {_sequences(size)}), and --min-gain is 2.0%"
    assert followed(Verdict.OFF, found, advice, tmp_path).method is None


def _sequences(size: int) -> str:
    return "1 sequence" if size == 1 else f"{size} sequences"


@pytest.mark.parametrize("most", [0, 3])
def test_nothing_was_drafted(most: int) -> None:
    found = Measured("tiny", "ngram", 16, of_rate(0.0, most), np.full((1, 3), -1.0), None, ())
    advice = make_advice(found, 0.02, 3)
    assert advice.headline == "leave speculation off: the drafter offered nothing for these prompts"
    assert bool(advice.notes) == bool(most)
    assert (advice.is_off, advice.best_drafting_k(1)) == (True, 0)
    print_steps(make_console(120), found, advice)


def test_adaptive_where_requests_differ(tmp_path: Path) -> None:
    good, bad = 0.95 ** np.arange(1, 8), 0.1 ** np.arange(1, 8)
    found = measured(0.6, survival=np.stack([good, bad] * 100), max_num_seqs=256)
    advice = make_advice(found, 0.02, 7)
    assert advice.use_adaptive
    assert advice.headline.startswith("adaptive verification: +")
    config = followed(Verdict.ADAPTIVE, found, advice, tmp_path)
    assert config.enable_adaptive_verification
    assert (config.num_speculative_tokens, config.num_speculative_tokens_per_batch_size) == (7, None)
    assert not make_advice(found, 10.0, 7).use_adaptive


def test_what_limits_the_advice_is_said() -> None:
    unknown = StepTimes(StepCost.from_tables(VerifyCost()), [StepPoint(8, 0, 0.0, 0.0, 8.0, 0), StepPoint(8, 3, 1.0, 3.0, 9.0, 0)], 0)
    noisy = StepPoint(8, 0, 0.0, 0.0, 8.0, 0, spread=0.3)
    advice = make_advice(measured(0.8, step_times=unknown, points=(noisy,), is_synthetic=True), 0.02, 9)
    text = " ".join(advice.notes)
    for words in ("no cost table", "beyond 8 sequences nothing is known", "30% apart", "no step verified more than 7 drafts", "synthetic"):
        assert words in text
    assert len(advice.rates) == 8
    assert advice.schedule[-1][1] == 8


def acceptance() -> AcceptReport:
    positions = tuple(PositionRates(0.8 ** (i + 1), 0.8, 100, None) for i in range(7))
    groups = [Acceptance(name, 4, 1.0, 100, SpecStats(10, 70, 30), 0.4, 4.0, 3.0, positions, None) for name in ("total", "chat", "coding")]
    return AcceptReport("tiny", groups, 0, {}, False, None, [])


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plots`")
    found = measured()
    path = tmp_path / "advice.png"
    draw(path, found, make_advice(found, 0.02, 7), acceptance())
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")
    assert width > height > 600


def test_tables() -> None:
    found = measured()
    advice = make_advice(found, 0.02, 7)
    console = make_console(160)
    with console.capture() as capture:
        print_steps(console, found, advice)
    text = capture.get()
    for words in ("a sequence's step", "steps as they were measured", f"{1e3 * advice.rates[63, 0]:.1f}"):
        assert words in text
