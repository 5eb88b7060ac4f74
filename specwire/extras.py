"""What is installed only with an extra of the package."""

import importlib.util
from collections.abc import Sequence

from specwire.errors import FailedPreconditionError

_ENGINE = ("torch", "transformers", "safetensors")


def check_engine(*names: str) -> None:
    """Raises FailedPreconditionError unless what runs models is installed.

    Args:
        names: packages of the extra `engine`; none = those that all models need.
    """
    missing = [name for name in names or _ENGINE if importlib.util.find_spec(name) is None]
    if missing:
        raise FailedPreconditionError(f"models are run here, but {not_installed(missing, 'engine')}")


def not_installed(missing: Sequence[str], extra: str) -> str:
    """That packages are missing, at least one, and which extra of Specwire brings them."""
    verb = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {verb} not installed: install Specwire with the extra {extra} (in its folder: pip install '.[{extra}]')"
