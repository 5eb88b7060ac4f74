"""`specwire canary`: starts, changes and ends a canary, and shows what it came to."""

import dataclasses
import json
from collections.abc import Sequence

import typer
from rich.table import Table

from specwire.cli.connection import ConnectionOptions, hint_at_up, make_client
from specwire.console import make_console, make_table
from specwire.messages import CanaryAction, VariantStatus

_FILE_WIDTH = 140  # columns of the table where there is no terminal
_NONE = "–"
_BESIDE_K = {"method": "method", "enable_adaptive_verification": "adaptive"}
"""What else may differ between the two, and the names of its columns; K has one anyway."""
_SAID = {
    CanaryAction.START: "The canary runs.",
    CanaryAction.SET_SHARE: "The canary has its new share.",
    CanaryAction.PROMOTE: "The canary is promoted until the coordinator's next start; write its configuration into specwire.yaml.",
    CanaryAction.ROLL_BACK: "The canary is rolled back.",
}


def change_canary(connection: ConnectionOptions, action: CanaryAction, share: float, config: str, *, as_json: bool) -> None:
    """Does it, and shows what both configurations came to so far. Raises SpecwireError if it can't be done."""
    with hint_at_up(), make_client(connection) as client:
        variants = client.set_canary(action, share=share, config=config)
    _show(variants, _SAID[action], as_json=as_json)


def show_canary(connection: ConnectionOptions, *, as_json: bool) -> None:
    """What both configurations came to so far. Raises SpecwireError if the coordinator can't be asked."""
    with hint_at_up(), make_client(connection) as client:
        variants = client.get_status().variants
    _show(variants, "" if variants else "No canary runs.", as_json=as_json)


def _show(variants: Sequence[VariantStatus], said: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"variants": [dataclasses.asdict(variant) for variant in variants]}))
        return
    if said:
        typer.echo(said)
    if variants:
        make_console(_FILE_WIDTH).print(make_variants_table(variants))


def make_variants_table(variants: Sequence[VariantStatus]) -> Table:
    """A row for each; what else than K differs between them has a column."""
    configs = [json.loads(variant.config or "{}") for variant in variants]
    different = [key for key in _BESIDE_K if len({json.dumps(config.get(key)) for config in configs}) > 1]
    header = (
        "variant", *(_BESIDE_K[key] for key in different), "K by batch size", "share", "requests", "ended", "failed", "tokens", "acceptance length",
        "first token", "per token",
    )  # fmt: skip
    has_ended = not any(variant.share for variant in variants)  # both have none then
    rows = [
        (
            variant.name,
            *(_shown(config.get(key)) for key in different),
            variant.schedule,
            _NONE if has_ended else f"{100 * variant.share:.4g}%",
            f"{variant.num_requests}",
            f"{variant.num_ended}",
            f"{variant.num_failed}",
            f"{variant.num_generated_tokens}",
            f"{variant.acceptance_length:.2f}" if variant.num_drafts else _NONE,
            f"{variant.first_token_ms:.1f} ms" if variant.first_token_ms else _NONE,
            f"{variant.token_ms:.2f} ms" if variant.token_ms else _NONE,
        )
        for variant, config in zip(variants, configs, strict=True)
    ]
    return make_table(header, rows, num_left=2 + len(different))


def _shown(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else json.dumps(value)
