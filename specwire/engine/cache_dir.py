"""The user's cache directory, and writing there without races."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from specwire.errors import FailedPreconditionError

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/specwire, or ~/.cache/specwire.

    Raises:
        FailedPreconditionError: this user has no home (of a container, say).
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if root.startswith("~"):
        raise FailedPreconditionError(f"user {os.getuid()} has no home directory to keep a cache in; set XDG_CACHE_HOME to a folder, or HOME")
    return Path(root) / "specwire"


def remembered(kind: str, key: str, compute: Callable[[], str]) -> str:
    """The text that `compute` gave for this key once, kept in the cache directory under `kind`. Of processes that compute it at the same
    time all get the text of the first. What is not as it was written (a machine that lost power, a full disk) is computed anew."""
    path = cache_dir() / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.1"
    known = _read_sealed(path)
    if known is not None:
        return known
    result = compute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:
            file.write(_seal(result))
            file.flush()
            try:
                os.link(file.name, path)
            except FileExistsError:
                known = _read_sealed(path)
                if known is None:
                    logger.warning("the %s in %s is damaged and replaced", kind, path)
                    path.unlink()
                    os.link(file.name, path)
    except OSError as error:
        logger.warning("cannot keep a %s in %s (%s): it is computed again at the next start", kind, path.parent, error)
    return result if known is None else known


def _seal(text: str) -> bytes:
    return hashlib.sha256(text.encode()).hexdigest().encode() + b"\n" + text.encode()


def _read_sealed(path: Path) -> str | None:
    """None unless there is what `_seal` made."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    text = content.partition(b"\n")[2]
    return text.decode() if hashlib.sha256(text).hexdigest().encode() + b"\n" + text == content else None


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's content, computed once per path, size and times. Images of containers and copies set the modification time as they
    like, so that another model may have the same; the time of the last change is the system's own."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    state = path.stat()
    return remembered("file_sha256", f"{path.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}", compute)
