"""Folders for sockets, wherever temporary files go."""

import socket
import tempfile
from pathlib import Path

import pytest

from specwire.errors import FailedPreconditionError
from specwire.socket_folder import socket_folder


@pytest.mark.parametrize("num_bytes", [10, 60, 200])
def test_sockets_fit_whatever_the_length_of_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    parent = tmp_path / ("x" * num_bytes)
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with socket_folder("specwire-http-") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/drafter-63")
    assert not Path(folder).exists()


def test_tmpdir_is_taken_where_it_is_short(monkeypatch: pytest.MonkeyPatch, socket_dir: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(socket_dir))
    with socket_folder("specwire-") as folder:
        assert Path(folder).parent == socket_dir


def test_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(FailedPreconditionError, match=r"no folder for sockets can be made in /nowhere \(No such file or directory\); set TMPDIR"):
        socket_folder("specwire-")
