"""Which build this is."""

import functools
import importlib.metadata


@functools.cache
def build_version() -> str:
    """Version of the installed distribution, "unknown" in a checkout that is not installed."""
    try:
        return importlib.metadata.version("specwire")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
