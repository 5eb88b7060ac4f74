"""Variants of the engine's kernels against each other, inside captured decode steps: a decision by one call.

- `check`: graphs with every switch on against the same kernels one by one, and against the torch twins in float32.
- `products`: cuts of the products of a few rows. What beats cuBLAS belongs into `specwire.engine.kernels.tuned_products`, if it helps a step, too.
- `rows`: cuts of streamed products of one and two rows of llama-1b's weights, alone and fused, beside what the engine takes.
- `draft`: calls of llama-1b as a drafter makes them, for one row with one and two new tokens, two rows and eight: shorter pieces of attention, all
  passes as one graph, streamed and fused rows, the head's too; with the cuts that `rows` found, if its file lies beside.
- `decode` (llama-8b's shape), `smollm` (smollm2-135m's): `base`, which is what the engine takes, without early starts and without products of our
  own. Others are a name and what differs from base as JSON: `--variants 'mine:{"products": []}'`. All variants share the weights and the KV cache;
  runs of decode steps take turns, in an order that turns round each time. `base` stands at the end once more, as `base again`: how far that is
  from the first one is what a difference must exceed.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu import engine_check
from benchmarks.gpu.draft_variants import CASES, Calls, Case, describe, draft_variants, floor_ms, read_sweep, share_of_equal
from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, SMALL, SMOLLM2_135M, TINY, TINY_DRAFT
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.kernel_sweeps import sweep_products
from benchmarks.gpu.kernel_variants import BASE, CHANGES, options_of
from benchmarks.gpu.row_sweeps import sweep_rows
from benchmarks.gpu.sizes import BLOCK_SIZE, Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import RESULTS, Slices, make_parser
from benchmarks.gpu.timing import copy_bandwidth
from specwire.engine.graphs.backends import Backend, TorchBackend, TritonBackend
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kernels.options import KernelOptions, Product, ProductTuning, RowProduct
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

SLICES = SECONDS["variants"]
AGAIN, ROWS = "base again", "rows"
C = TypeVar("C")
_STEPS_PER_RUN = 48
_PRODUCT_MODELS = {"llama-8b": LLAMA_8B, "llama-1b": LLAMA_1B, "smollm2-135m": SMOLLM2_135M}


@dataclass(frozen=True, slots=True)
class _ChosenSizes(RoundLimits):
    """Graphs of the batches that are measured, and of no other."""

    sizes: tuple[int, ...]

    def graph_sizes(self) -> list[int]:
        return sorted(self.sizes)


def make_backend(model: Decoder, options: KernelOptions) -> Backend:
    """On a CPU the twins, whatever the options are."""
    if model.device.type == "cpu":
        return TorchBackend(model.config, model.device, model.dtype, BLOCK_SIZE)
    return TritonBackend(model.config, model.device, options)


def check(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every switch on, for the checks' model: ragged rounds of many sequences, then of few, of which a third have a single row."""
    shapes = {(2 * SMALL.intermediate_size, SMALL.hidden_size), (SMALL.hidden_size, SMALL.intermediate_size), (SMALL.hidden_size, SMALL.hidden_size)}
    shapes.add(((SMALL.num_heads + 2 * SMALL.num_kv_heads) * SMALL.head_dim, SMALL.hidden_size))
    tuning = ProductTuning(features=64, depth=64, splits=2, num_stages=3, prefetch_depth=256)
    everything = KernelOptions(starts_early=True, products=tuple(Product(rows, *shape, tuning) for rows in (16, 32, 64) for shape in shapes))
    many = engine_check.QUICK if options.tiny else engine_check.FULL
    few = engine_check.CheckSizes(many.model, RoundLimits(3, 2, 512, 512), (0,), 6 if options.tiny else 60)
    products = tuple(RowProduct(*shape) for shape in (*shapes, (SMALL.vocab_size, SMALL.hidden_size)))
    rows = replace(everything, row_products=products, streamed_rows=2, fused_rows=2, attention_split=64)
    for name, sizes, chosen in (("many sequences", many, everything), ("up to three sequences", few, everything), ("rows streamed", few, rows)):
        backend = partial(make_backend, options=chosen)
        for row in engine_check.check_graphs(options.device, sizes, engine_check.draw_plain, backend=backend):
            yield {"case": name, **row}


def decode(options: argparse.Namespace, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """A row for each variant and number of sequences."""
    variants = variants_of(options)
    sizes, device = chosen_sizes(options), options.device
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    model = dummy_model(TINY if options.tiny else config, dtype, device)
    cache = KVCache(model.config, sizes.max_num_seqs * sizes.num_blocks, dtype, device)
    for layer in cache.layers:
        layer.normal_()
    limits = _ChosenSizes(sizes.max_num_seqs, sizes.num_draft_tokens, sizes.max_num_batched_tokens, sizes.max_model_len, sizes.concurrency)
    runners: dict[str, RoundRunner] = {}
    for name, chosen in variants.items():
        started = time.perf_counter()
        runners[name] = RoundRunner(model, cache, limits, backend=make_backend(model, chosen))
        runners[name].capture()
        print(f"{name}: captured in {time.perf_counter() - started:.1f} s; {chosen}", flush=True)
    steps = Steps(model, sizes)
    runs = {name: partial(steps.run, runner) for name, runner in runners.items()}
    for count in sizes.concurrency:
        yield from compare(runs, count, {"c": count}, "ms_per_step", num_runs=2 if options.tiny else 7)


def draft(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each variant and case."""
    sizes, device = chosen_sizes(options), options.device
    config = TINY_DRAFT if options.tiny else LLAMA_1B
    model = dummy_model(config, torch.bfloat16 if device != "cpu" else torch.float32, device)
    swept = [] if options.tiny else read_sweep([Path(options.out or RESULTS), RESULTS], f"variants-{ROWS}")
    variants = draft_variants(config, KernelOptions.for_device(torch.device(device)), swept, options.variants)
    print("\n".join(describe(variants)), flush=True)
    cases = CASES[:2] if options.tiny else CASES
    calls = Calls(model, sizes, cases, is_tiny=options.tiny)
    runners: dict[str, DraftRunner] = {}
    for name, variant in variants.items():
        started = time.perf_counter()
        runners[name] = calls.make_runner(make_backend(model, variant.options), joins_passes=variant.joins_passes)
        print(f"{name}: captured in {time.perf_counter() - started:.1f} s", flush=True)
    bandwidth = copy_bandwidth() if device != "cpu" else None
    for case in cases:
        columns: dict[str, Any] = {"c": case.num_rows, "new_tokens": case.num_tokens, "k": sizes.num_draft_tokens}
        if bandwidth is not None:
            columns["floor_ms"] = floor_ms(config, sizes.num_draft_tokens, bandwidth, model.dtype.itemsize)
        drafts = {name: calls.drafts(runner, case) for name, runner in runners.items()}
        runs: dict[str, Callable[[Case], float]] = {name: partial(calls.run, runner) for name, runner in runners.items()}
        for row in compare(runs, case, columns, "ms_per_call", num_runs=2 if options.tiny else 5):
            yield row | {"equal_drafts": share_of_equal(drafts.get(row["variant"], drafts[BASE]), drafts[BASE])}


def variants_of(options: argparse.Namespace) -> dict[str, KernelOptions]:
    """Base and those asked for."""
    base = KernelOptions.for_device(torch.device(options.device))
    return dict(options_of(text, base) for text in (BASE, *(options.variants or CHANGES)))


def compare(runs: Mapping[str, Callable[[C], float]], case: C, columns: Mapping[str, Any], unit: str, *, num_runs: int) -> Iterator[dict[str, Any]]:
    """Runs of the same case by each variant, in turns.

    Args:
        runs: give milliseconds.
        columns: of the rows, that say which case it is.
        unit: the column of the times.
    """
    names = [*runs, AGAIN]
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in runs.values():
        run(case)
    for number in range(num_runs):
        for name in names if number % 2 == 0 else reversed(names):
            times[name].append(runs[BASE if name == AGAIN else name](case))
    for name in names:
        ratios = [mine / base for mine, base in zip(times[name], times[BASE], strict=True)]
        yield {
            **columns,
            "variant": name,
            unit: statistics.median(times[name]),
            "x_base": statistics.median(ratios),
            "x_base_least": min(ratios),
            "x_base_most": max(ratios),
            "ms_of_runs": times[name],
        }


class Steps:
    """Decode steps behind a prompt of random keys and values, two in flight."""

    def __init__(self, model: Decoder, sizes: Sizes) -> None:
        order = random.sample(range(sizes.max_num_seqs * sizes.num_blocks), sizes.max_num_seqs * sizes.num_blocks)
        self._tables = [order[slot * sizes.num_blocks :][: sizes.num_blocks] for slot in range(sizes.max_num_seqs)]
        self._first, self._num_steps = sizes.num_prompt_tokens, min(_STEPS_PER_RUN, sizes.num_steps)
        params, vocab_size = SamplingParams(temperature=0.0, max_tokens=None), model.config.vocab_size
        self._sampling = SlotSampling(params, key=1, vocab_size=vocab_size, token_ids=[0], num_prompt_tokens=1, device=model.device)

    def run(self, runner: RoundRunner, count: int) -> float:
        """Milliseconds of a step."""
        for slot in range(count):
            runner.open(slot, self._sampling)
        # The first step also brings the block tables.
        before = runner.launch(self._rows(count, self._first))
        started = 0.0
        for step in range(1, self._num_steps + 1):
            launched = runner.launch(self._rows(count, self._first + step))
            before.results()
            started = started or time.perf_counter()
            before = launched
        before.results()
        return (time.perf_counter() - started) / self._num_steps * 1e3

    def _rows(self, count: int, position: int) -> list[RoundRow]:
        return [RoundRow(slot, position, (0,), 0, self._tables[slot], self._sampling, from_device=True) for slot in range(count)]


def rows_of(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures a slice."""
    if name == "check":
        return check(options)
    if name in ("decode", "smollm"):
        return decode(options, LLAMA_8B if name == "decode" else SMOLLM2_135M)
    if name == "draft":
        return draft(options)
    if options.device == "cpu":
        raise SystemExit(f"{name} times kernels of a GPU; leave it out on a CPU")
    if name == ROWS:
        return sweep_rows(LLAMA_1B, copy_bandwidth(), KernelOptions.for_device(torch.device(options.device)))
    return sweep_products(_PRODUCT_MODELS[options.product_model], options.product_rows, copy_bandwidth())


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    parser.add_argument("--variants", nargs="+", default=[], help="beside base, all if none is named: " + ", ".join(CHANGES) + "; `draft` has others")
    parser.add_argument("--product-model", choices=list(_PRODUCT_MODELS), default="llama-8b", help="whose products are swept")
    parser.add_argument("--product-rows", nargs="+", type=int, default=[8, 32], help="rows of the products that are swept, 2 to 128")
    slices, options = Slices.parse("variants", parser, arguments)
    if options.only != ["draft"]:  # which has names of its own, and looks itself
        variants_of(options)  # a mistake in them ends the program here
    for name in slices.pending():
        with slices.open(name) as part:
            for row in rows_of(name, options):
                part.add(row)
        if options.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
