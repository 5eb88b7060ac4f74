"""How sharp a head's drafts are drawn where requests sample, if its folder says so."""

from specwire.engine.heads.config import HeadConfig
from specwire.errors import InvalidArgumentError
from specwire.speculative_config import MAX_SHARPNESS, MIN_SHARPNESS

_KEY = "draft_sharpness"


def read_sharpness(config: HeadConfig) -> float:
    """What config.json has under draft_sharpness, 1 without it: the head's logits are multiplied by it before noise is added.

    Raises:
        InvalidArgumentError: it is no number within the bounds of the option of this name.
    """
    value = config.options.get(_KEY, 1.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not MIN_SHARPNESS <= value <= MAX_SHARPNESS:
        raise InvalidArgumentError(f"{config.name}: {_KEY} is {value!r}, but must be a number from {MIN_SHARPNESS} to {MAX_SHARPNESS}; remove it")
    return float(value)
