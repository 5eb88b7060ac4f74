"""The folder into which a measurement writes its files."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from specwire.errors import InvalidArgumentError


def check_folder(path: Path, names: Sequence[str]) -> None:
    """Makes the folder for these files, but none of them.

    Raises:
        InvalidArgumentError: it or one of them can't be written: better known before a long run than after it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in names:
            for file in (path / name, _scratch(path / name)):
                with file.open("a", encoding="utf-8"):
                    pass
                if not file.stat().st_size:
                    file.unlink()
    except OSError as error:
        raise InvalidArgumentError(f"--output {path} can't be written: {error.strerror}; choose another folder") from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write a file that shall be there whole or not at all: under another name, which becomes its own at the end."""
    scratch = _scratch(path)
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}")
