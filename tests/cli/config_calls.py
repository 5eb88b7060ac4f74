"""Calls of `specwire config`, and a file for them."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from specwire.cli import app

FILE = """\
speculative_config:
  num_speculative_tokens: 4
  num_speculative_tokens_per_batch_size: [[1, 4, 6], [8, 12, 2], [30, 40, 1]]
verifier:
  max_num_seqs: 16
coordinator:
  max_num_seqs: 20
drafters:
  - {method: ngram, count: 2}
  - {model: draft, num_speculative_tokens: 6}
"""


def config(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments])


def shown(*arguments: str) -> dict[str, Any]:
    result = config("show", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)
