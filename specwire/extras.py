"""What is installed only with an extra of the package."""

import importlib.util

from specwire.errors import FailedPreconditionError

_ENGINE = ("torch", "transformers", "safetensors")


def check_engine(*names: str) -> None:
    """Raises FailedPreconditionError unless what runs models is installed.

    Args:
        names: packages of the extra `engine`; none = those that all models need.
    """
    missing = [name for name in names or _ENGINE if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise FailedPreconditionError(
            f"models are run here, but {', '.join(missing)} {verb} not installed: install Specwire with the extra engine "
            "(in its folder: pip install '.[engine]')"
        )
