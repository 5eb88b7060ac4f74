"""JSON files of a model's folder, whoever wrote them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specwire.errors import InvalidArgumentError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        InvalidArgumentError: it can't be read (an interrupted download, say), or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} can't be read as JSON ({error}); fetch or save it again") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{path} holds no JSON object, but {type(value).__name__}; fetch or save it again")
    return value


def token_ids(values: Mapping[str, Any], key: str) -> list[int]:
    """The ids under a key that holds one id, several, or none.

    Raises:
        InvalidArgumentError: something else.
    """
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise InvalidArgumentError(f"{key} of the model is {value!r}, but must be a token id or a list of them; save config.json and the like again")
    return ids


def read_shards(index: Path) -> list[str]:
    """Names of the files that a model.safetensors.index.json lists, sorted; see `read_json_object` for errors."""
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InvalidArgumentError(f"{index} has no weight_map from tensors to files; fetch or save it again")
    return sorted(set(names.values()))
