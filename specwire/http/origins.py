"""Where the tokens of answers came from, for requests that set return_token_origins."""

from typing import Any

from specwire.client import Choice, StreamEvent
from specwire.messages import SpecStats, TokenOrigin

_NAMES = {origin: origin.name.lower() for origin in TokenOrigin}


def show_origins(part: Choice | StreamEvent) -> dict[str, Any]:
    """Further fields of a choice: `token_origins`, in a stream also `token_pieces`, and at its end `speculation`."""
    shown: dict[str, Any] = {"token_origins": [_NAMES[origin] for origin in part.origins]}
    if isinstance(part, StreamEvent):
        shown["token_pieces"] = None if part.pieces is None else list(part.pieces)
    if part.spec is not None:
        shown["speculation"] = _show_stats(part.spec)
    return shown


def _show_stats(spec: SpecStats) -> dict[str, Any]:
    return {
        "num_steps": spec.num_steps,
        "num_drafts": spec.num_drafts,
        "num_draft_tokens": spec.num_draft_tokens,
        "num_accepted_tokens": spec.num_accepted_tokens,
        "accepted_per_position": list(spec.accepted_per_position),
        "acceptance_length": spec.acceptance_length,
    }
