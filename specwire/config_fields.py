"""A field of a configuration: its flag, its help and what it may be."""

import dataclasses
import re
from typing import Any

from specwire.addresses import check_address, check_addresses
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.speculative_config import SpeculativeConfig
from specwire.text import is_unicode

MAX_NUMBER = 2**31 - 1
"""Counts are int32 in messages."""
MAX_NUM_SEQS = 100_000
"""Of one service: coordinators keep a list of so many slots."""


def option(
    default: Any,
    text: str,
    low: float | None = None,
    pattern: str | None = None,
    high: float = MAX_NUMBER,
    lowest_port: int | None = None,
    instead: str = "",
) -> Any:
    """A field that is also a command-line flag: its help text, and what it may be.

    Args:
        low, high: range of a number.
        pattern: regular expression that a text must match.
        lowest_port: makes it an address, or a tuple of addresses, with ports from this one; no address is fine where the default has none.
        instead: only the default is built, and this is what to do instead of another value.
    """
    rules = {"help": text, "low": low, "high": high, "pattern": pattern, "lowest_port": lowest_port, "instead": instead}
    return dataclasses.field(default=default, metadata=rules)


def flag_name(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def format_value(value: object) -> str:
    """A field's value as its flag takes it."""
    if isinstance(value, SpeculativeConfig):
        return value.to_json()
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_field(field: "dataclasses.Field[Any]", value: Any, name: str) -> None:
    """Check a value of the field's type.

    Args:
        name: what the one who gave it calls it.

    Raises:
        InvalidArgumentError: it is none that the field may have.
        UnsupportedError: only the default is built.
    """
    rules = field.metadata
    if rules["instead"] and value != field.default:
        raise UnsupportedError(f"{name} is {format_value(value)}, but only {format_value(field.default)} is built; {rules['instead']}")
    # Written so that NaN is refused too.
    if rules["low"] is not None and not rules["low"] <= value <= rules["high"]:
        raise InvalidArgumentError(f"{name} is {value}, but must be a number from {rules['low']} to {rules['high']} ({rules['help']})")
    if isinstance(value, str) and not is_unicode(value):
        raise InvalidArgumentError(f"{name} is {value!r}, which is no UTF-8; write it in UTF-8")
    if rules["pattern"] is not None and not re.fullmatch(rules["pattern"], value):
        words = rules["pattern"].split("|")
        if all(map(str.isalnum, words)):
            raise InvalidArgumentError(f"{name} is {value!r}, but must be one of {', '.join(words)}")
        raise InvalidArgumentError(f"{name} is {value!r}, but must be: {rules['help']}")
    if rules["lowest_port"] is not None and (value or field.default):
        if isinstance(value, str):
            check_address(name, value, rules["lowest_port"])
        else:
            check_addresses(name, value, rules["lowest_port"])


def check_fields(config: object) -> None:
    """`check_field` of all fields, by their flags."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        check_field(field, getattr(config, field.name), flag_name(field.name))
