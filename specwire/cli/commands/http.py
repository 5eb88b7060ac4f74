"""`specwire http`: the OpenAI-compatible HTTP service in this process."""

import typer

from specwire.cli.app import app, exit_on_error


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def http(context: typer.Context) -> None:
    """Run the OpenAI-compatible HTTP API."""
    from specwire.cli.services import become_service

    with exit_on_error(2):
        become_service("http", "specwire.http", context.args)
