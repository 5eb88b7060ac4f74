"""Calls of `specwire batch`, and what they write."""

import json
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner, Result

from specwire.cli import app

PROMPTS = [{"prompt": "AB", "max_tokens": 2}, {"prompt": "MN", "max_tokens": 3, "id": "two"}, {"prompt_token_ids": [80], "max_tokens": 1}]


def lines(records: Sequence[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def batch(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)], input=stdin)


def records(text: str) -> dict[Any, dict[str, Any]]:
    """Records by id; each id stands once."""
    found = [json.loads(line) for line in text.splitlines()]
    assert len({record["id"] for record in found}) == len(found)
    return {record["id"]: record for record in found}
