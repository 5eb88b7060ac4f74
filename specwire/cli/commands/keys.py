"""`specwire keys`."""

from pathlib import Path
from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error

keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="API keys of a coordinator.")
app.add_typer(keys, name="keys")


@keys.callback()
def group() -> None:
    """API keys of a coordinator."""


@keys.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whom the key is for: a team, a program.")],
    file: Annotated[Path, typer.Option(help="The coordinator's --api-keys file; made if it is not there.")] = Path("api-keys.yaml"),
    max_concurrent_requests: Annotated[int, typer.Option(help="Most choices that wait or run at once; 0 = no limit.")] = 0,
    max_tokens_per_request: Annotated[int, typer.Option(help="Most tokens of prompt and output that a request may ask for; 0 = no limit.")] = 0,
    requests_per_minute: Annotated[int, typer.Option(help="Requests that are taken in a minute; 0 = no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="Tokens of prompts and outputs in a minute; 0 = no limit.")] = 0,
    min_priority: Annotated[int | None, typer.Option(help="Lowest number that its requests may have as their priority; left out = any.")] = None,
    expires: Annotated[str | None, typer.Option(help="Date or time (UTC) from which it is refused, such as 2030-12-31.")] = None,
    may_operate: Annotated[bool, typer.Option("--may-operate", help="It may also change what is done for all, such as a canary.")] = False,
) -> None:
    """Make an API key: its hash goes into the file, the key to standard output."""
    from specwire.cli.keys import add_key

    with exit_on_error(2):
        add_key(
            name,
            file,
            expires,
            max_concurrent_requests=max_concurrent_requests,
            max_tokens_per_request=max_tokens_per_request,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            min_priority=min_priority,
            may_operate=may_operate,
        )
