"""The choices of the engine's kernels that are compared: by name, or as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from specwire.engine.kernels.options import KernelOptions, Product, ProductTuning, RowCut, RowProduct, RowTuning

BASE = "base"
"""What the engine takes on the device."""
CHANGES: dict[str, dict[str, Any]] = {"no-early-start": {"starts_early": False}, "no-own-products": {"products": ()}}
"""Options that differ from those of base."""


def options_of(text: str, base: KernelOptions) -> tuple[str, KernelOptions]:
    """(name, options) of a variant's name, or of a name, a colon and what differs from base as JSON. Ends the program where that is wrong."""
    name, _, given = text.partition(":")
    if not given:
        if name != BASE and name not in CHANGES:
            raise SystemExit(f"--variants has {text!r}, but there are {', '.join(CHANGES)}; of others give the options, as NAME:JSON")
        return name, dataclasses.replace(base, **CHANGES.get(name, {}))
    try:
        found: dict[str, Any] = dict(json.loads(given))
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--variants has {text!r}, whose options are no JSON object: {error}") from None
    known = [field.name for field in dataclasses.fields(KernelOptions)]
    if unknown := found.keys() - set(known):
        raise SystemExit(f"--variants has {text!r}, but the backend takes {', '.join(known)}, not {', '.join(sorted(unknown))}")
    if "products" in found:
        found["products"] = products_of(found["products"])
    if "row_cut" in found:
        found["row_cut"] = RowCut(**found["row_cut"])
    if "row_products" in found:
        found["row_products"] = row_products_of(found["row_products"])
    return name, dataclasses.replace(base, **found)


def products_of(rows: Sequence[dict[str, Any]]) -> tuple[Product, ...]:
    """As `dataclasses.asdict` wrote them."""
    return tuple(Product(**{**row, "tuning": ProductTuning(**row["tuning"])}) for row in rows)


def row_products_of(rows: Sequence[dict[str, Any]]) -> tuple[RowProduct, ...]:
    """As `dataclasses.asdict` wrote them."""
    return tuple(RowProduct(**{**row, "tuning": (RowCut if "depth" in row["tuning"] else RowTuning)(**row["tuning"])}) for row in rows)
