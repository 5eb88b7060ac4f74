"""`specwire verifier`, `specwire drafter`, `specwire coordinator`: one service in this process."""

import typer

from specwire.cli.app import app, exit_on_error

# The service reads its flags itself, so that they are listed in one place.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASS_ON, add_help_option=False)
def verifier(context: typer.Context) -> None:
    """Run one verifier, which has the target model."""
    _become("verifier_svc", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def drafter(context: typer.Context) -> None:
    """Run one drafter."""
    _become("drafter_svc", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def coordinator(context: typer.Context) -> None:
    """Run one coordinator, which clients call."""
    _become("coordinator", context.args)


def _become(module: str, arguments: list[str]) -> None:
    from specwire.cli.services import become_service

    with exit_on_error(2):
        become_service(module, arguments)
