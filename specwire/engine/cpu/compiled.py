"""Where compiled code is kept between starts."""

import contextlib
import errno
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import numba

from specwire.engine.cache_dir import cache_dir

logger = logging.getLogger(__name__)

_NEEDED_BYTES = 64 << 20
"""Free in the file system: Numba, once it has begun to keep code, fails where there is no room for it."""


def keep_compiled(module: str = "", what: str = "") -> bool:
    """Has Numba keep code that is compiled from now on in our cache directory, unless NUMBA_CACHE_DIR names another. Returns whether it can.

    Args:
        module, what: whose compiling takes long, its `__name__`, and what it is in words: said where none of it is kept yet.

    Numba itself looks only at the file of a function, not at those that the function takes others from: each state of this package's
    sources gets a folder of its own.
    """
    if not numba.config.CACHE_DIR:
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        numba.config.CACHE_DIR = str(cache_dir() / "numba" / digest.hexdigest()[:16])
    folder = Path(numba.config.CACHE_DIR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < _NEEDED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryFile(dir=folder):
            _remove_damaged(folder)
            if what and not any(folder.rglob(f"{module.rpartition('.')[2]}.*.nbi")):
                logger.info("compiling code for this CPU, once: %s, some 16 s of CPU time; kept in %s", what, folder)
            return True
    except OSError as error:
        logger.warning(
            "cannot keep compiled code in %s (%s): it is compiled again at each start, which takes some 16 s for each form of weights", folder, error
        )
        return False


@functools.cache
def _remove_damaged(folder: Path) -> None:
    """Removes kept code that a machine which lost power has cut or left empty: Numba would fail on it at each start. All of it is pickled: it begins
    with the byte of a protocol and ends with that of an end."""
    for path in folder.rglob("*.nb[ic]"):
        with contextlib.suppress(FileNotFoundError):  # another process was first
            content = path.read_bytes()
            if content[:1] != b"\x80" or content[-1:] != b".":
                logger.warning("compiled code in %s is damaged and compiled again", path)
                path.unlink()
