"""What a canary's configuration may change. Pure."""

import dataclasses
from typing import Any

from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.speculative_config import SpeculativeConfig, read_keys

K, SCHEDULE, ADAPTIVE, METHOD = (
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification",
    "method",
)
CHANGEABLE = (K, SCHEDULE, ADAPTIVE, METHOD)
"""Keys in which a canary may differ: how many drafts a request is given, and by which of the drafters that are there; all else is a matter of the
services themselves."""
_OTHER_SERVICES = "drafters and verifiers are started with it; start another coordinator with other ones"


def changed(speculative: SpeculativeConfig, config: str, most: int) -> SpeculativeConfig:
    """A configuration with other values of some keys. A K without a schedule replaces the schedule, too.

    Args:
        config: those keys, as JSON.
        most: K for which the services were started.

    Raises:
        InvalidArgumentError: an unknown key or a wrong value, or nothing is changed.
        UnsupportedError: a key in which requests of one coordinator can't differ.
    """
    given = read_keys(config)
    for key, value in given.items():
        if key not in CHANGEABLE and value != getattr(speculative, key, None) and not (key == "model" and METHOD in given):
            raise UnsupportedError(f"the canary's {key} is {value!r}, but it may differ only in {', '.join(CHANGEABLE)}: {_OTHER_SERVICES}")
    values: dict[str, Any] = {key: given[key] for key in CHANGEABLE if key in given}
    if METHOD in values:
        if not values[METHOD]:
            raise UnsupportedError(f"the canary's method is null; for one without drafts give it {SCHEDULE} [[1, 1, 0]]")
        if isinstance(values[METHOD], list):
            values[METHOD] = tuple(values[METHOD])
        if values[METHOD] != speculative.method:
            values["model"] = given.get("model")
    if K in values:
        values = {SCHEDULE: None} | values
        if isinstance(values[K], int) and values[K] > most:
            text = f"the canary's {K} is {values[K]}, but the services were started for {most}"
            raise InvalidArgumentError(f"{text}; choose that or less, or restart them with more and a schedule that gives the base less")
    if isinstance(values.get(SCHEDULE), list):
        values[SCHEDULE] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in values[SCHEDULE])
    checked = SpeculativeConfig(**values)
    k = checked.num_speculative_tokens if K in values else speculative.num_speculative_tokens
    if speculative.synthetic_acceptance_rates is not None:
        values["synthetic_acceptance_rates"] = speculative.synthetic_acceptance_rates[:k]
    if speculative.synthetic_acceptance_length is not None:
        values["synthetic_acceptance_length"] = min(speculative.synthetic_acceptance_length, k + 1)
    result = dataclasses.replace(speculative, **values)
    if result == speculative:
        raise InvalidArgumentError(f"the canary's configuration is that of all requests; change {' or '.join(CHANGEABLE)}")
    return result
