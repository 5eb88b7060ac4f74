"""The variants of the engine's kernels that are measured by default, and what is expected of each.

Milliseconds a token of llama-8b, sequences of 576 positions, where this began: 4.48, 4.99, 5.45, 8.24, 13.15 at 1, 8, 32, 128, 256 sequences; of
these the products take 3.97, 4.01, 4.16, 4.63, 6.03, and the time between kernels about 0.2. Memory is nearly idle from the end of a product
until the next one has begun: about 26 us in each of 32 layers at 8 sequences, half of it attention that waits for its loads.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from specwire.engine.kernels.options import KernelOptions, LayerTuning, Product, ProductTuning
from specwire.engine.kernels.work_list import AttentionTuning

BASE = "base"
TUNED = "tuned-products"
"""Takes what the sweep of products found to be faster than cuBLAS."""
EVERYTHING = "everything"

_CHAIN: dict[str, Any] = {"early": "chain", "early_from": 0}
_MB = 2**20

EXPECTED: dict[str, tuple[KernelOptions, str]] = {
    "chain": (
        KernelOptions(**_CHAIN),
        "c=1: -0.15 to -0.25 ms, most of what passes between kernels, and the weights' first tiles; else -0.03, attention alone starts early",
    ),
    "all-early": (
        KernelOptions(early="all", early_from=0),
        "c=1 as chain; else between -0.1 and +0.1: behind a product that does not announce an early start has cost 0.7 us",
    ),
    "stripes-8": (
        KernelOptions(**_CHAIN, stripe_bytes=8 * _MB, stripe_tokens=256),
        "c=8, 32: -0.2: four times 8 MB a layer at 4.2 TB/s are 8 us, of which most fits where memory was idle; less at 1 (chain has a part of it), "
        "and at 128 and 256, where attention's own loads evict what waits for the o product",
    ),
    "stripes-16": (
        KernelOptions(**_CHAIN, stripe_bytes=16 * _MB, stripe_tokens=256),
        "c=1, 8: up to -0.3 if 16 MB arrive in the 3 us of a small kernel and its launch, or while the product begins; else as stripes-8",
    ),
    "stripes-32": (
        KernelOptions(**_CHAIN, stripe_bytes=32 * _MB, stripe_tokens=256),
        "as stripes-16, or worse: most of the second-level cache, and more than passes before the product asks for it",
    ),
    "kv-64": (
        KernelOptions(**_CHAIN, prefetched_positions=64),
        "c=1: -0.05 beside chain: the first of three tiles is near when attention begins; c=8, 32: -0.03; c=128, 256: under 1%",
    ),
    "kv-256": (
        KernelOptions(**_CHAIN, prefetched_positions=256),
        "c=1, 8: -0.08 beside chain, all tiles of a split are near; c=256: as kv-64, or worse",
    ),
    "short-splits": (
        KernelOptions(**_CHAIN, prefetched_positions=128, attention=AttentionTuning(few_min_split=128)),
        "c=1: -0.02 beside kv-64: two tiles one after the other instead of three, two more splits to merge",
    ),
    "fused-row": (
        KernelOptions(**_CHAIN, fuses_rows=True),
        "c=1: -0.1 beside chain: six kernels a layer instead of nine, but each product norms the row itself (about 1 us); else nothing",
    ),
    "own-head": (
        KernelOptions(**_CHAIN, own_head=True),
        "c=1: -0.03 beside chain, if cuBLAS reads the vocabulary's 1 GB at less than 3.7 TB/s as it does other weights; else nothing",
    ),
    "wide": (
        KernelOptions(**_CHAIN, layer=LayerTuning(norm_numbers_per_warp=1024, silu_block=2048)),
        "c=128, 256: -0.03: twice the loads of a thread under way; several rows a program would leave multiprocessors idle",
    ),
    TUNED: (
        KernelOptions(**_CHAIN),
        "c=8, 32: -0.2 to -0.3: all kernels announce, so nothing passes between them and each product's first tiles arrive early",
    ),
    EVERYTHING: (
        KernelOptions(
            **_CHAIN, stripe_bytes=8 * _MB, stripe_tokens=256, prefetched_positions=64, fuses_rows=True, own_head=True,
            layer=LayerTuning(norm_numbers_per_warp=1024, silu_block=2048),
        ),
        "c=1: 4.1 ms; c=8: 4.6; c=32: 5.1; c=128: 8.0; c=256: 12.9 or, beside a base of 12.5, 12.3",
    ),
}  # fmt: skip


def options_of(text: str, tuned: Sequence[Product] = ()) -> tuple[str, KernelOptions]:
    """(name, options) of a variant's name, or of a name, a colon and the options as JSON. Ends the program where there is no such thing.

    Args:
        text: as on the command line.
        tuned: products of our own that were faster than cuBLAS.
    """
    name, _, given = text.partition(":")
    if not given:
        if name != BASE and name not in EXPECTED:
            raise SystemExit(f"--variants has {text!r}, but there are {', '.join(EXPECTED)}; of others give the options, as NAME:JSON")
        options = EXPECTED[name][0] if name in EXPECTED else KernelOptions()
        return name, dataclasses.replace(options, products=tuple(tuned)) if name in (TUNED, EVERYTHING) else options
    try:
        found: dict[str, Any] = json.loads(given)
    except json.JSONDecodeError as error:
        raise SystemExit(f"--variants has {text!r}, whose options are no JSON: {error}") from None
    known = [field.name for field in dataclasses.fields(KernelOptions)]
    if unknown := found.keys() - set(known):
        raise SystemExit(f"--variants has {text!r}, but the backend takes {', '.join(known)}, not {', '.join(sorted(unknown))}")
    if "layer" in found:
        found["layer"] = LayerTuning(**found["layer"])
    if "attention" in found:
        found["attention"] = AttentionTuning(**found["attention"])
    if "products" in found:
        found["products"] = products_of(found["products"])
    return name, KernelOptions(**found)


def products_of(rows: Sequence[dict[str, Any]]) -> tuple[Product, ...]:
    """As `dataclasses.asdict` wrote them."""
    return tuple(Product(**{**row, "tuning": ProductTuning(**row["tuning"])}) for row in rows)
