"""The user's cache directory, and writing there without races."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/specwire, or ~/.cache/specwire."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "specwire"


def remembered(kind: str, key: str, compute: Callable[[], str]) -> str:
    """The text that `compute` gave for this key once, kept in the cache directory under `kind`. Of processes that compute it at the same
    time all get the text of the first."""
    path = cache_dir() / kind / hashlib.sha256(key.encode()).hexdigest()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    result = compute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:
            file.write(result.encode())
            file.flush()
            os.link(file.name, path)
    except FileExistsError:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        logger.warning("cannot keep a %s in %s (%s): it is computed again at the next start", kind, path.parent, error)
    return result


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's content, computed once per path, size and modification time."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    state = path.stat()
    return remembered("file_sha256", f"{path.resolve()} {state.st_size} {state.st_mtime_ns}", compute)
