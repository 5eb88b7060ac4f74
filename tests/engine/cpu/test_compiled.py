"""Compiled code is kept where it can be, by the state of the sources; where it can't, that is said and nothing fails."""

import logging
import shutil

import numba
import pytest

from specwire.engine.cpu.compiled import keep_compiled


@pytest.fixture(autouse=True)
def no_folder_yet(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")


def test_code_is_kept_in_the_cache_directory_and_that_it_takes_time_is_said_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert keep_compiled()
        assert keep_compiled()
    assert [str(path) for path in (tmp_path / "specwire" / "numba").iterdir()] == [numba.config.CACHE_DIR]
    assert caplog.text.count("compiling code for this CPU") == 1


def test_another_folder_goes_before(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "mine"))
    assert keep_compiled()
    assert str(tmp_path / "mine") == numba.config.CACHE_DIR


def test_a_cache_directory_that_cannot_be_written_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "specwire").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert not keep_compiled()
    assert "compiled again at each start" in caplog.text


def test_a_full_disk_is_reported_before_anything_is_compiled(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with caplog.at_level(logging.WARNING):
        assert not keep_compiled()
    assert "No space left on device" in caplog.text
