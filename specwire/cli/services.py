"""`specwire verifier` and its like: `python -m verifier_svc`, and ./specwire.yaml where there is one."""

import os
import sys
from collections.abc import Sequence

import typer

from specwire.config import PROGRAM_VARIABLE
from specwire.config_file import find_config_file

_ANSWERED_AT_ONCE = ("-h", "--help")


def become_service(command: str, module: str, arguments: Sequence[str]) -> None:
    """Replaces this process by the service; returns never.

    Args:
        command: what the user calls it: verifier.

    Raises:
        InvalidArgumentError: SPECWIRE_CONFIG names a file that is not there.
    """
    names_file = any(argument.split("=")[0] in ("--config", *_ANSWERED_AT_ONCE) for argument in arguments)
    path = None if names_file else find_config_file(None, in_folder=True)
    if path is not None:
        typer.echo(f"specwire: configuration of {path}", err=True)
    sys.stderr.flush()
    environment = os.environ | {PROGRAM_VARIABLE: f"specwire {command}"}
    os.execve(sys.executable, [sys.executable, "-m", module, *([f"--config={path}"] if path else []), *arguments], environment)
