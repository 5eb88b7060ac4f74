"""Compiled code is kept where it can be, by the state of the sources; where it can't, that is said and nothing fails."""

import logging
import runpy
import shutil
from collections.abc import Iterator
from typing import Any

import numba
import pytest
import torch
from numba.core.dispatcher import Dispatcher

from specwire.engine.cpu import compiled
from specwire.engine.cpu.compiled import keep_compiled


@pytest.fixture(autouse=True)
def no_folder_yet(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")


def test_code_is_kept_in_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keep_compiled()
    assert keep_compiled()
    assert [str(path) for path in (tmp_path / "specwire" / "numba").iterdir()] == [numba.config.CACHE_DIR]


def test_that_compiling_takes_time_is_said_once_for_each_form(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    head = "import numba\nfrom specwire.engine.cpu.compiled import keep_compiled\n"
    for name in ("first_form", "second_form"):
        program = f"_IS_KEPT = keep_compiled('some.{name}', 'weights of {name}')\n@numba.njit('int64(int64)', cache=_IS_KEPT)\n"
        (tmp_path / f"{name}.py").write_text(f"{head}{program}def successor(number):\n    return number + 1\n")
    with caplog.at_level(logging.INFO):
        for name in ("first_form", "first_form", "second_form", "second_form", "first_form"):
            assert runpy.run_path(str(tmp_path / f"{name}.py"))["successor"](41) == 42
        assert keep_compiled()
    said = [record.getMessage().partition(",")[2] for record in caplog.records if "compiling code for this CPU" in record.getMessage()]
    assert said == [f" once: weights of {name}, some 16 s of CPU time; kept in {tmp_path}/kept" for name in ("first_form", "second_form")]


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


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-20] + bytes(20), lambda content: bytes(len(content))])
def test_damaged_code_is_compiled_again(monkeypatch, tmp_path, caplog, damage):
    """As a machine that lost power leaves it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "program.py").write_text("import numba\n@numba.njit(cache=True)\ndef successor(number):\n    return number + 1\n")

    def start_and_run() -> tuple[int, int]:
        """What the function gives, and how often it was compiled."""
        compiled._remove_damaged.cache_clear()
        assert keep_compiled()
        successor = runpy.run_path(str(tmp_path / "program.py"))["successor"]
        return successor(41), sum(successor.stats.cache_misses.values())

    assert start_and_run() == (42, 1)
    for kind in ("nbi", "nbc"):
        assert start_and_run() == (42, 0)
        [path] = (tmp_path / "kept").rglob(f"*.{kind}")
        path.write_bytes(damage(path.read_bytes()))
        assert start_and_run() == (42, 1)
        assert f"{path} is damaged and compiled again" in caplog.text


def functions_of(entry: Any) -> Iterator[Any]:
    """A compiled function and all that it calls."""
    found, left = {entry}, [entry]
    while left:
        function = left.pop()
        yield function
        code = function.py_func.__code__
        cells = [cell.cell_contents for cell in function.py_func.__closure__ or ()]
        named = [function.py_func.__globals__.get(name) for name in code.co_names]
        new = {value for value in (*cells, *named) if isinstance(value, Dispatcher)} - found
        found |= new
        left += new


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_fp16"), reason="this CPU has no AVX512-FP16")
@pytest.mark.timeout(600)  # what is not kept yet is compiled
def test_functions_that_meet_in_one_process_have_different_names():
    """Whatever process compiled them: machine code of another function with the same name would run in their place."""
    from specwire.engine.cpu.byte_drafts import enter_drafts
    from specwire.engine.cpu.half_work import enter_half
    from specwire.engine.cpu.q4_work import enter_q4

    functions = set().union(*(functions_of(entry) for entry in (enter_drafts, enter_half, enter_q4)))
    names = [(function.py_func.__module__, function.py_func.__qualname__) for function in functions]
    assert len(names) > 50
    assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)
