"""Variants of the engine's kernels against each other, inside captured decode steps of llama-8b's shape: a decision by one call.

A variant is a name and, after a colon, keyword arguments of the backend as JSON: `--variants 'early:{"launches_early": true}'`. All variants
share the weights and the KV cache; runs of decode steps take turns, in an order that turns round each time. `base` stands at the end once more,
as `base again`: how far that is from the first one is what a difference must exceed.
"""

import inspect
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.engine_models import LLAMA_8B, TINY
from benchmarks.gpu.sizes import BLOCK_SIZE, Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slices, make_parser
from specwire.engine.graphs.backends import Backend, TorchBackend, TritonBackend
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kernels.linear import Linear
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

SLICES = {"decode": 120}
"""For two variants beside base."""
BASE, AGAIN = "base", "base again"
_STEPS_PER_RUN = 48


class PlainRows(TritonBackend):
    """Products of a single row through cuBLAS."""

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `Backend.linear`."""
        return linear(x)


_TRITON: dict[str, type[TritonBackend]] = {"cublas-rows": PlainRows}
"""Variants that are more than an argument."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What stands behind a name."""

    name: str
    make: Callable[[Decoder], Backend]

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Ends the program where the backend has no such argument."""
        name, _, given = text.partition(":")
        kind = _TRITON.get(name, TritonBackend)
        try:
            arguments: dict[str, Any] = json.loads(given) if given else {}
        except json.JSONDecodeError as error:
            raise SystemExit(f"--variants has {text!r}, whose arguments are no JSON: {error}") from None
        known = list(inspect.signature(kind).parameters)[2:]
        if unknown := arguments.keys() - set(known):
            raise SystemExit(f"--variants has {text!r}, but the backend takes {', '.join(known) or 'no arguments'}, not {', '.join(sorted(unknown))}")

        def make(model: Decoder) -> Backend:
            if model.device.type == "cpu":
                return TorchBackend(model.config, model.device, model.dtype, BLOCK_SIZE)
            return kind(model.config, model.device, **arguments)

        return cls(name, make)


def measure(variants: Sequence[Variant], sizes: Sizes, device: str, *, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """A row for each variant and number of sequences."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    model = dummy_model(TINY if is_tiny else LLAMA_8B, dtype, device)
    cache = KVCache(model.config, sizes.max_num_seqs * sizes.num_blocks, dtype, device)
    for layer in cache.layers:
        layer.normal_()
    limits = RoundLimits(sizes.max_num_seqs, sizes.num_draft_tokens, sizes.max_num_batched_tokens, sizes.max_model_len)
    runners: dict[str, RoundRunner] = {}
    for variant in variants:
        started = time.perf_counter()
        runners[variant.name] = RoundRunner(model, cache, limits, backend=variant.make(model))
        runners[variant.name].capture()
        print(f"{variant.name}: captured in {time.perf_counter() - started:.1f} s", flush=True)
    steps = Steps(model, sizes)
    names = [*runners, AGAIN]
    num_runs = 2 if is_tiny else 9
    for count in sizes.concurrency:
        times: dict[str, list[float]] = {name: [] for name in names}
        for name in runners:
            steps.run(runners[name], count)
        for number in range(num_runs):
            for name in names if number % 2 == 0 else reversed(names):
                times[name].append(steps.run(runners[BASE if name == AGAIN else name], count))
        for name in names:
            ratios = [mine / base for mine, base in zip(times[name], times[BASE], strict=True)]
            yield {
                "c": count,
                "variant": name,
                "ms_per_step": statistics.median(times[name]),
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


def main(arguments: list[str] | None = None) -> None:
    """Measures the variants asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    parser.add_argument("--variants", nargs="+", default=[], help="beside base; also: " + ", ".join(_TRITON))
    slices, options = Slices.parse("variants", parser, arguments)
    variants = [Variant.parse(text) for text in (BASE, *options.variants)]
    for name in slices.pending():
        with slices.open(name) as part:
            for row in measure(variants, chosen_sizes(options), options.device, is_tiny=options.tiny):
                part.add(row)


if __name__ == "__main__":
    main()
