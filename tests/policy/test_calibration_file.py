"""Calibration across restarts: what comes back, and what is refused, with a log."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specwire.policy.calibration import NUM_BINS, Calibrator
from specwire.policy.calibration_file import load_calibration, save_calibration


def trained(num_positions: int = 3) -> Calibrator:
    rng = np.random.default_rng(0)
    calibrator = Calibrator(num_positions)
    for method, is_greedy in (("ngram", False), ("draft_model", True)):
        group = calibrator.group(method, is_greedy=is_greedy)
        for _ in range(40):
            drafts = calibrator.calibrate(rng.random((16, num_positions)), np.full(16, group))
            calibrator.observe(drafts, np.full(16, num_positions), rng.integers(0, num_positions + 1, 16))
    return calibrator


def table(calibrator: Calibrator, method: str, *, is_greedy: bool) -> np.ndarray:
    scores = np.repeat(np.linspace(0, 1, 21)[:, None], calibrator.num_positions, axis=1)
    return calibrator.calibrate(scores, np.full(21, calibrator.group(method, is_greedy=is_greedy))).confidences


def test_it_comes_back(tmp_path: Path) -> None:
    path, before, after = tmp_path / "calibration.json", trained(), Calibrator(3)
    assert save_calibration(path, before, "a+b")
    assert load_calibration(path, after, "a+b")
    before.restore(before.groups, before.trials, before.accepted)  # what its estimates do not follow yet
    for method, is_greedy in before.groups:
        assert table(after, method, is_greedy=is_greedy) == pytest.approx(table(before, method, is_greedy=is_greedy), abs=0.005)
    assert (table(after, "ngram", is_greedy=True) == table(Calibrator(3), "ngram", is_greedy=True)).all(), "what was not learned has its prior"
    assert after.statistics() == [], "observations of before are not counted again"
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize("num_positions", [2, 5])
def test_another_number_of_positions_takes_its_part(tmp_path: Path, num_positions: int) -> None:
    path, after = tmp_path / "calibration.json", Calibrator(num_positions)
    save_calibration(path, trained(), "a")
    assert load_calibration(path, after, "a")
    shared = min(3, num_positions)
    assert (after.trials[:, :shared].sum(axis=2) > 0).all()
    assert not after.trials[:, shared:].any()


def change(key: str, value: Any) -> Callable[[Any], Any]:
    return lambda document: document | {key: value}


def change_group(key: str, value: Any) -> Callable[[Any], Any]:
    return lambda document: document | {"groups": [document["groups"][0] | {key: value}]}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change("models", "a+c"), "has models 'a+c', but here it is 'a'"),
        (change("version", 2), "has version 2, but here it is 1"),
        (change("num_bins", 7), f"has num_bins 7, but here it is {NUM_BINS}"),
        (change("format", "other"), "is no calibration file"),
        (lambda document: [document], "is no calibration file"),
        (change("groups", {}), "has no list of at most"),
        (change("groups", [3]), "has a group without a method"),
        (change_group("method", 3), "has a group without a method"),
        (change_group("greedy", "no"), "has a group without a method"),
        (change_group("trials", [[1.0]]), "has counts of shape (1, 1)"),
        (change_group("trials", "many"), "has counts"),
        (change_group("trials", None), "has counts"),
        (change_group("trials", [[1.0] * NUM_BINS, [1.0]]), "has counts that are no numbers"),
        (change_group("trials", [[-1.0] * NUM_BINS]), "or out of range"),
        (change_group("trials", [[float("nan")] * NUM_BINS]), "or out of range"),
        (change_group("trials", [[float("inf")] * NUM_BINS]), "or out of range"),
        (change_group("accepted", [[1e6] * NUM_BINS]), "has more accepted drafts than drafts"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, damage: Callable[[Any], Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    path, after = tmp_path / "calibration.json", Calibrator(3)
    save_calibration(path, trained(), "a")
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert not load_calibration(path, after, "a")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "calibration starts afresh" in record.getMessage()
    assert reason in record.getMessage()
    assert after.groups == [], "nothing is taken of a file that is refused"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_no_json(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(content)
    assert not load_calibration(path, Calibrator(3), "a")
    assert "can't be read" in caplog.text


def test_a_first_start_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not load_calibration(tmp_path / "none.json", Calibrator(3), "a")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(path, trained(), "a")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    assert not save_calibration(path, Calibrator(2), "b")
    assert "can't be kept" in caplog.text
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert not save_calibration(tmp_path / "missing" / "c.json", Calibrator(2), "b")
