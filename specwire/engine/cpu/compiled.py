"""Where compiled code is kept between starts."""

import hashlib
from pathlib import Path

import numba

from specwire.engine.cache_dir import cache_dir


def keep_compiled() -> None:
    """Has Numba keep code that is compiled from now on in our cache directory, unless NUMBA_CACHE_DIR names another.

    Numba itself looks only at the file of a function, not at those that the function takes others from: each state of this package's
    sources gets a folder of its own.
    """
    if not numba.config.CACHE_DIR:
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        numba.config.CACHE_DIR = str(cache_dir() / "numba" / digest.hexdigest()[:16])
