"""The file of API keys: names, hashes and limits. Keys themselves are shown once, when they are made, and kept nowhere."""

import dataclasses
import datetime
import difflib
import hashlib
import json
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specwire.errors import InvalidArgumentError

_KEY_BYTES = 32
_MOST = 2**53
_LIMITS = ("max_concurrent_requests", "max_tokens_per_request", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry. A limit of 0 is none.

    Args:
        name: of whom the key was made for: in logs, in errors, and what separates the caches of different keys.
        hash: SHA-256 of the key in hex. The keys are 256 random bits, so there is nothing to guess and no need for a slow hash.
        max_concurrent_requests: most choices (n of each request) that wait or run at once.
        max_tokens_per_request: most tokens of prompt and output that one request may ask for, over all its choices.
        requests_per_minute: requests that are taken, refilled evenly; as many may come at once.
        tokens_per_minute: tokens of prompts and outputs, refilled evenly. Outputs count once they are there, so a minute may overdraw it;
            nothing more is taken until that is made up for.
        min_priority: lowest number (the most important) that its requests may have as their priority; None = any.
        expires: from then on the key is refused; None = never.
        may_operate: the key may also change what the coordinator does for all, such as start and end a canary.

    Raises:
        InvalidArgumentError: naming the field and its value.
    """

    name: str
    hash: str
    max_concurrent_requests: int = 0
    max_tokens_per_request: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    min_priority: int | None = None
    expires: datetime.datetime | None = None
    may_operate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.@-]{1,64}", self.name):
            raise InvalidArgumentError(f"name is {self.name!r}, but must be 1 to 64 letters, digits or any of . _ - @")
        if not isinstance(self.hash, str) or not re.fullmatch("[0-9a-f]{64}", self.hash):
            # It may be a key that somebody put there.
            raise InvalidArgumentError("hash is not the 64 lower-case hex digits of a SHA-256; `specwire keys new` writes entries")
        for name in _LIMITS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
                raise InvalidArgumentError(f"{name} is {value!r}, but must be a whole number from 0 (no limit) to {_MOST}")
        priority = self.min_priority
        if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31):
            raise InvalidArgumentError(f"min_priority is {priority!r}, but must be a whole number from {-(2**31)} to {2**31 - 1}, or left out")
        if not isinstance(self.may_operate, bool):
            raise InvalidArgumentError(f"may_operate is {self.may_operate!r}, but must be true or false")
        if self.expires is not None and self.expires.tzinfo is None:
            raise InvalidArgumentError(f"expires is {self.expires.isoformat()}, which has no time zone; write it with one, such as Z")

    def has_expired(self, now: datetime.datetime) -> bool:
        return self.expires is not None and now >= self.expires


def make_key() -> str:
    """A new key: 256 random bits."""
    return f"sw-{secrets.token_urlsafe(_KEY_BYTES)}"


def hash_key(key: str) -> str:
    """What the file has in a key's place."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_api_keys(path: str) -> tuple[ApiKey, ...]:
    """The entries of a YAML or JSON list; `[]` has none.

    Raises:
        InvalidArgumentError: the file can't be read or has no list, or an entry is wrong; it names the entry.
    """
    keys = _parse(_read(path), path)
    if keys is None:
        # A file that is written in place is empty for a moment, in which nobody must be locked out.
        raise InvalidArgumentError(f"the API keys {path} have no list; make one with `specwire keys new`, or write [] for no keys at all")
    return keys


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InvalidArgumentError(f"the API keys {path} can't be read ({reason}); check the path and who may read it") from error


def add_api_key(path: str, entry: ApiKey) -> None:
    """Appends an entry to the file, or makes the file, readable by its owner alone. The rest of it stays as it is.

    Raises:
        InvalidArgumentError: the file is wrong, or has the name already.
    """
    file = Path(path)
    text = _read(path) if file.exists() else ""
    old = _parse(text, path) or ()
    if any(known.name == entry.name for known in old):
        raise InvalidArgumentError(f"{path} has a key named {entry.name!r} already; choose another name, or remove that entry first")
    new = _append(text, _to_object(entry))
    try:
        is_good = _parse(new, path) == (*old, entry)
    except InvalidArgumentError:
        is_good = False
    if not is_good:
        raise InvalidArgumentError(f"{path} is written in a way that nothing can be appended to; make it a YAML list with one `- name:` a key")
    _replace(file, new)


def parse_expiry(value: object) -> datetime.datetime | None:
    """A date or time, in ISO 8601 if it is text; without a time zone it is UTC. Raises InvalidArgumentError for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError as error:
            raise InvalidArgumentError(f"expires is {value!r}, but must be a date or time such as 2030-12-31 or 2030-12-31T18:00:00Z") from error
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
    raise InvalidArgumentError(f"expires is {value!r}, but must be a date or time such as 2030-12-31 or 2030-12-31T18:00:00Z")


def _parse(text: str, path: str) -> tuple[ApiKey, ...] | None:
    """None: there is nothing but comments."""
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise InvalidArgumentError(f"the API keys {path} are neither YAML nor JSON{where}; see docs/security.md for the form") from error
    except (ValueError, AttributeError, RecursionError) as error:  # such as a 30th of February, or a number of thousands of digits
        raise InvalidArgumentError(f"the API keys {path} have a value that is none ({error}); see docs/security.md for the form") from error
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise InvalidArgumentError(f"the API keys {path} are a {type(entries).__name__}, but must be a list with an entry for each key")
    keys = []
    for number, entry in enumerate(entries, start=1):
        try:
            keys.append(_parse_entry(entry))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"the API keys {path}, entry {number}: {error}") from error
    for name in ("name", "hash"):
        values = [getattr(key, name) for key in keys]
        doubled = next((index for index, value in enumerate(values) if value in values[:index]), None)
        if doubled is not None:
            raise InvalidArgumentError(
                f"the API keys {path}, entry {doubled + 1}: its {name} is that of entry {values.index(values[doubled]) + 1}; remove one"
            )
    return tuple(keys)


def _parse_entry(entry: Any) -> ApiKey:
    names = [field.name for field in dataclasses.fields(ApiKey)]
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"it is a {type(entry).__name__}, but must have name and hash")
    for key in entry:
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, 1)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(names)}"
            raise InvalidArgumentError(f"{key!r} is not known; {remedy}")
    for name in ("name", "hash"):
        if name not in entry:
            raise InvalidArgumentError(f"{name} is missing; `specwire keys new` writes entries")
    return ApiKey(**{**entry, "expires": parse_expiry(entry.get("expires"))})


def _to_object(entry: ApiKey) -> dict[str, Any]:
    """Without the limits that there are not."""
    values: dict[str, Any] = {"name": entry.name, "hash": entry.hash}
    values |= {name: getattr(entry, name) for name in _LIMITS if getattr(entry, name)}
    if entry.min_priority is not None:
        values["min_priority"] = entry.min_priority
    if entry.may_operate:
        values["may_operate"] = True
    return values if entry.expires is None else values | {"expires": entry.expires.isoformat()}


def _append(text: str, entry: dict[str, Any]) -> str:
    if text.lstrip().startswith("["):
        return json.dumps([*json.loads(text), entry], indent=2) + "\n"
    item = re.search(r"^( *)- ", text, re.MULTILINE)
    indent = item.group(1) if item else ""
    lines = yaml.safe_dump([entry], sort_keys=False, default_flow_style=False).splitlines()
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}" + "".join(f"{indent}{line}\n" for line in lines)


def _replace(file: Path, text: str) -> None:
    """Puts the new file in the old one's place in one step: a coordinator may read it at any time."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
            new.write(text)
        os.chmod(new.name, mode)
        os.replace(new.name, file)
    except OSError as error:
        raise InvalidArgumentError(f"{file} can't be written ({error.strerror}); check the folder and who may write there") from error
