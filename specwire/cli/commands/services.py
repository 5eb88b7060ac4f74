"""`specwire verifier`, `specwire drafter`, `specwire coordinator`: one service in this process."""

import typer

from specwire.cli.app import app, exit_on_error

# The service reads its flags itself, so that they are listed in one place.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASS_ON, add_help_option=False)
def verifier(context: typer.Context) -> None:
    """Run one verifier, which has the target model."""
    _become(context, "verifier_svc")


@app.command(context_settings=_PASS_ON, add_help_option=False)
def drafter(context: typer.Context) -> None:
    """Run one drafter."""
    _become(context, "drafter_svc")


@app.command(context_settings=_PASS_ON, add_help_option=False)
def coordinator(context: typer.Context) -> None:
    """Run one coordinator, which clients call."""
    _become(context, "coordinator")


def _become(context: typer.Context, module: str) -> None:
    from specwire.cli.services import become_service

    with exit_on_error(2):
        become_service(str(context.info_name), module, context.args)
