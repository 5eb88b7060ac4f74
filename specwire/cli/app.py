"""The command line's frame: the app that commands register with, and errors as messages and exit statuses."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from specwire.config import DEFAULT_FILE, FILE_VARIABLE
from specwire.errors import SpecwireError
from specwire.standard_files import open_standard_files

_GRPC_LOG = ("GRPC_VERBOSITY", "ERROR")
"""gRPC writes its own lines past our log, also where nothing is wrong: each service that stops is one. Services that are started here inherit it."""

# They read the file themselves.
_WITHOUT_CLIENT = ("up", "verifier", "drafter", "coordinator", "http", "config")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 120},
    help="Speculative decoding for large language models, split into gRPC services.",
)


def main() -> None:
    """Entry point: status 2 for wrong arguments, 1 for anything else that fails, with a message on stderr."""
    open_standard_files()
    os.environ.setdefault(*_GRPC_LOG)  # gRPC reads it when it is imported
    try:
        app(prog_name="specwire")
    except OSError as error:  # of standard output or a file; click is silent about a pipe that nobody reads
        if error.errno is None:
            raise
        _drop_output()
        where = error.filename or "standard output or a file"
        with contextlib.suppress(OSError):
            typer.echo(f"specwire: {where} can't be read or written ({error.strerror}); name another file, or make room", err=True)
        sys.exit(1)


def _drop_output() -> None:
    """What standard output would not take does not make a second error of the program's end."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def exit_on_error(status: int) -> Iterator[None]:
    """Turns an error that the user can act on into its message on stderr and an exit status."""
    try:
        yield
    except SpecwireError as error:
        typer.echo(f"specwire: {error}", err=True)
        raise typer.Exit(status) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        from specwire.version import build_version

        typer.echo(f"specwire {build_version()}")
        raise typer.Exit


@app.callback()
def specwire(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Options of every command; --version acts in its callback."""
    if context.invoked_subcommand in _WITHOUT_CLIENT or not (os.environ.get(FILE_VARIABLE) or os.path.exists(DEFAULT_FILE)):
        return
    from specwire.cli.sources import client_defaults

    with exit_on_error(2):
        context.default_map = client_defaults(context.command)
