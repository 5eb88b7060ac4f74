"""Variants of a draft model's call against each other: the kernels of its passes, and whether its passes are one graph."""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernel_variants import BASE, options_of
from benchmarks.gpu.row_sweeps import KINDS, best_products, weights_of
from benchmarks.gpu.sizes import BLOCK_SIZE, Sizes
from specwire.engine.graphs.backends import Backend
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.kernels.options import KernelOptions, RowCut, RowProduct
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder

_CALLS_PER_RUN, _TINY_CALLS = 12, 3
_NUM_COMMITTED = 4
"""Tokens that a sequence gets between two calls; the KV of all but the last is that of drafts."""
_ATTENTION_SPLIT = 64
_CUTS = (RowCut(2, 2048), RowCut(8, 1024), RowCut(4, 2048, 8))
JOINED = "joined"


@dataclass(frozen=True, slots=True)
class Case:
    """What a call is asked.

    Args:
        num_rows: sequences.
        num_tokens: of each in the first pass: 1, or 2 once all drafts of the call before were accepted.
    """

    num_rows: int
    num_tokens: int


CASES = (Case(1, 1), Case(1, 2), Case(2, 1), Case(8, 1))


@dataclass(frozen=True, slots=True)
class DraftVariant:
    """Kernels, and whether the passes of a call over one row are one graph."""

    options: KernelOptions
    joins_passes: bool = False


def draft_variants(config: ModelConfig, base: KernelOptions, swept: Sequence[Mapping[str, Any]], given: Sequence[str]) -> dict[str, DraftVariant]:
    """By name; `given` are those asked for, all if there are none.

    Args:
        base: what the engine takes.
        swept: rows of `row_sweeps.sweep_rows` for this shape; without any, cuts are those that are right for most.
        given: names, or NAME:JSON as `options_of` reads it, with `"joined": true` for one graph.
    """
    layer = tuple(RowProduct(weight.out_features, weight.in_features) for weight in weights_of(config)[:-1])
    head = RowProduct(config.vocab_size, config.hidden_size)
    found = {
        BASE: DraftVariant(base),
        "split-64": DraftVariant(replace(base, attention_split=_ATTENTION_SPLIT)),
        JOINED: DraftVariant(base, joins_passes=True),
        **{f"cut-{cut.block}x{cut.depth}": DraftVariant(replace(base, row_cut=cut)) for cut in _CUTS},
        "head": DraftVariant(replace(base, row_products=(head,))),
        "streamed": DraftVariant(replace(base, row_products=layer)),
        "streamed-2": DraftVariant(replace(base, row_products=layer, streamed_rows=2)),
        "fused": DraftVariant(replace(base, row_products=layer, fused_rows=1)),
        "fused-2": DraftVariant(replace(base, row_products=layer, streamed_rows=2, fused_rows=2)),
        "all": DraftVariant(_all(base, (*layer, head)), joins_passes=True),
    }
    if swept:
        streamed, fused = (best_products(list(map(dict, swept)), kind) for kind in KINDS)
        found["swept"] = DraftVariant(replace(base, row_products=streamed, streamed_rows=2))
        known = {(product.out_features, product.in_features): product for product in (*layer, *streamed, *fused)}  # the last one stays
        best = tuple(known.values())
        found["swept-fused"] = DraftVariant(replace(base, row_products=best, streamed_rows=2, fused_rows=2))
        found["swept-all"] = DraftVariant(_all(base, best), joins_passes=True)
    if not given:
        return found
    chosen = {BASE: found[BASE]}
    for text in given:
        name, _, changes = text.partition(":")
        if not changes:
            if name not in found:
                raise SystemExit(f"--variants has {text!r}, but there are {', '.join(found)}; of others give the options, as NAME:JSON")
            chosen[name] = found[name]
            continue
        fields = _object(text, changes)
        joins_passes = bool(fields.pop(JOINED, False))
        chosen[name] = DraftVariant(options_of(f"{name}:{json.dumps(fields)}", base)[1], joins_passes)
    return chosen


def _all(base: KernelOptions, products: tuple[RowProduct, ...]) -> KernelOptions:
    return replace(base, row_products=products, streamed_rows=2, fused_rows=2, attention_split=_ATTENTION_SPLIT)


def _object(text: str, changes: str) -> dict[str, Any]:
    try:
        return dict(json.loads(changes))
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--variants has {text!r}, whose options are no JSON object: {error}") from None


def read_sweep(folders: Sequence[Path], name: str) -> list[dict[str, Any]]:
    """Rows of a complete sweep in the first folder that has one; none if it has not run."""
    for folder in folders:
        path = folder / f"{name}.json"
        if path.is_file() and (found := json.loads(path.read_text())).get("is_complete"):
            return list(found["rows"])
    return []


class Calls:
    """Calls behind a prompt of random keys and values, one after the other as a drafter makes them.

    Args:
        model: the draft model.
        sizes: K and the prompt's length.
        cases: that are measured.

    Attributes:
        num_calls: of a run.
    """

    def __init__(self, model: Decoder, sizes: Sizes, cases: Sequence[Case], *, is_tiny: bool) -> None:
        self._model, self._k, self._first = model, sizes.num_draft_tokens, sizes.num_prompt_tokens
        self.num_calls = _TINY_CALLS if is_tiny else _CALLS_PER_RUN
        self._num_rows = max(case.num_rows for case in cases)
        most = self._first + _NUM_COMMITTED * (self.num_calls + 1) + 2 + self._k
        self._num_blocks = -(-most // BLOCK_SIZE)
        self._cache = KVCache(model.config, self._num_rows * self._num_blocks, model.dtype, model.device)
        for layer in self._cache.layers:
            layer.normal_()
        tables = torch.randperm(self._num_rows * self._num_blocks)
        self._tables: list[list[int]] = tables.view(self._num_rows, self._num_blocks).tolist()

    def make_runner(self, backend: Backend, *, joins_passes: bool) -> DraftRunner:
        """Captured."""
        runner = DraftRunner(
            self._model, self._cache, max_num_seqs=self._num_rows, max_num_drafts=self._k, max_model_len=self._num_blocks * BLOCK_SIZE,
            max_chunk=self._num_rows, backend=backend, joins_passes=joins_passes,
        )  # fmt: skip
        runner.capture()
        return runner

    def run(self, runner: DraftRunner, case: Case) -> float:
        """Median milliseconds of a call, from the host's rows to its drafts."""
        return statistics.median(ms for ms, _ in self._calls(runner, case))

    def drafts(self, runner: DraftRunner, case: Case) -> list[list[int]]:
        """What is drafted, row by row of all calls; the same at every call of this for the same keys and values before."""
        return [token_ids for _, drafts in self._calls(runner, case) for token_ids in drafts]

    def _calls(self, runner: DraftRunner, case: Case) -> list[tuple[float, list[list[int]]]]:
        """All but the first one, which also brings the block tables: milliseconds and drafts."""
        for slot in range(case.num_rows):
            runner.open(slot, DraftSampling(0.0, slot, 0))
        found = []
        for call in range(self.num_calls):
            position = self._first + _NUM_COMMITTED * call
            blocks = -(-(position + case.num_tokens + self._k) // BLOCK_SIZE)
            rows = [DraftRow(slot, position, [3] * case.num_tokens, self._tables[slot][:blocks], self._k) for slot in range(case.num_rows)]
            started = time.perf_counter()
            drafts = runner.launch(rows)()
            found.append(((time.perf_counter() - started) * 1e3, [row.token_ids for row in drafts]))
            assert all(len(row.token_ids) == self._k for row in drafts), f"{self._k} drafts wanted: {drafts}"
        return found[1:]


def share_of_equal(drafts: Sequence[list[int]], expected: Sequence[list[int]]) -> float:
    """Of first drafts: later ones follow from them. Kernels round in different orders, so that near ties may fall otherwise."""
    return statistics.mean(own[0] == other[0] for own, other in zip(drafts, expected, strict=True))


def floor_ms(config: ModelConfig, num_drafts: int, bandwidth: float, itemsize: int) -> float:
    """Of a call of one row: its weights, over the bandwidth."""
    layer = sum(weight.out_features * weight.in_features for weight in weights_of(config)[:-1])
    return num_drafts * itemsize * (config.num_layers * layer + config.vocab_size * config.hidden_size) / bandwidth * 1e3


def describe(variants: Mapping[str, DraftVariant]) -> Iterator[str]:
    """A line for each."""
    for name, variant in variants.items():
        yield f"{name}: {'one graph, ' if variant.joins_passes else ''}{variant.options}"
