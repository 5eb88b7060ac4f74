"""The engine alone: checks that graphs equal the same kernels one by one and the torch twins, then times decoding and prefill beside a peer.

The batch is the concurrency: random prompts, greedy, no stop; best of the repeats. `memory` is for a memory checker around this process (see README).
"""

import argparse
import random
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from benchmarks.gpu import engine_check, peer
from benchmarks.gpu.engine_alone import Engine
from benchmarks.gpu.engine_models import LLAMA_8B, SMOLLM2_135M, TINY
from benchmarks.gpu.noise import check_noise
from benchmarks.gpu.sizes import add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slices, make_parser
from benchmarks.gpu.timing import copy_bandwidth
from specwire.engine.models.config import ModelConfig

_MAX_PROFILED_KERNELS = 14
_MODELS = {"llama-8b": LLAMA_8B, "smollm2-135m": SMOLLM2_135M}


def _check(draw: engine_check.Asks, *, is_synthetic: bool = False) -> "Part":
    def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        sizes = engine_check.QUICK if options.tiny else engine_check.FULL
        return engine_check.check_graphs(options.device, sizes, draw, is_synthetic=is_synthetic)

    return rows


def _noise_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return check_noise(options.device, 2052 if options.tiny else LLAMA_8B.vocab_size)


def _memory_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return engine_check.check_memory(options.device, engine_check.QUICK)


def _decode(name: str) -> "Part":
    def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Decoding beside the peer, and its prefill."""
        engine, sizes = _make_engine(name, options), chosen_sizes(options)
        for count in sizes.concurrency:
            engine.prefill(count)
            engine.decode(count)
            compiled: list[object] = []
            triton.knobs.compilation.listener = lambda into=compiled, **event: into.append(event)
            prefill_s, decode_s = [], []
            for _ in range(sizes.num_repeats):
                prefill_s.append(engine.prefill(count))
                decode_s.append(engine.decode(count))
            triton.knobs.compilation.listener = None
            tok_s, peer_tok_s = count * sizes.num_steps / min(decode_s), peer.PLAIN_TOK_S[name].get(count)
            ms = min(decode_s) / sizes.num_steps * 1e3
            row = {"c": count, "ms_per_token": ms, "tok_s": tok_s, "peer_tok_s": peer_tok_s, "x_peer": tok_s / peer_tok_s if peer_tok_s else None}
            if name == "llama-8b":
                row |= {"gemm_ms": peer.GEMM_MS.get(count), "prefill_s": min(prefill_s), "peer_prefill_s": peer.PREFILL_S.get(count)}
            yield row | {"launch_ms": engine.launch_ms(count), "compiled_after_ready": len(compiled), "capture_s": engine.capture_s}

    return rows


def _prefill_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prompts of llama-8b, in rounds of at most max_num_batched_tokens."""
    engine, sizes = _make_engine("llama-8b", options), chosen_sizes(options)
    for count in sizes.concurrency:
        engine.prefill(count)
        seconds, peer_s = min(engine.prefill(count) for _ in range(sizes.num_repeats)), peer.PREFILL_S.get(count)
        tok_s = count * sizes.num_prompt_tokens / seconds
        yield {"c": count, "prefill_s": seconds, "tok_s": tok_s, "peer_prefill_s": peer_s, "x_peer": peer_s / seconds if peer_s else None}


def _profile_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Where the device's time of a decode step goes."""
    if options.device == "cpu":
        raise SystemExit("profile reads the times of CUDA kernels; leave it out on a CPU")
    num_steps = chosen_sizes(options).num_steps
    for name in _MODELS:
        engine = _make_engine(name, options)
        for count in chosen_sizes(options).concurrency:
            engine.prefill(count)
            engine.decode(count)
            engine.prefill(count)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                engine.decode(count)
            events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
            by_name: dict[str, list[float]] = {}
            for event in events:
                by_name.setdefault(event.name[:70], []).append(event.device_time_total)
            span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
            busy = sum(map(sum, by_name.values()))
            yield {"case": f"{name} c={count}: idle", "us_per_step": (span - busy) / num_steps, "calls": len(events) / num_steps}
            for kernel, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_MAX_PROFILED_KERNELS]:
                yield {"case": f"{name} c={count}: {kernel}", "us_per_step": sum(times) / num_steps, "calls": len(times) / num_steps}
        del engine
        torch.cuda.empty_cache()


def _make_engine(name: str, options: argparse.Namespace) -> Engine:
    config: ModelConfig = TINY if options.tiny else _MODELS[name]
    engine = Engine(config, chosen_sizes(options), options.device)
    print(f"{name}: weights {engine.load_s:.1f} s, {len(engine.runner.graph_sizes)} graphs {engine.capture_s:.1f} s", flush=True)
    return engine


Part = Callable[[argparse.Namespace], Iterator[dict[str, Any]]]
_PARTS: dict[str, tuple[int, Part]] = {
    "noise": (5, _noise_rows),
    "check": (40, _check(engine_check.draw_plain)),
    "check-processed": (60, _check(engine_check.draw_processed)),
    "check-synthetic": (40, _check(engine_check.draw_plain, is_synthetic=True)),
    "llama8b": (65, _decode("llama-8b")),
    "smollm": (40, _decode("smollm2-135m")),
    "prefill": (45, _prefill_rows),
    "profile": (90, _profile_rows),
    "memory": (10, _memory_rows),
}
"""About how many seconds each takes, and what it measures."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the slices asked for."""
    parser = make_parser(__doc__ or "", {name: seconds for name, (seconds, _) in _PARTS.items()})
    add_sizes(parser)
    slices, options = Slices.parse("engine", parser, arguments)
    seed = time.time_ns()
    random.seed(seed)
    torch.manual_seed(seed)
    is_timed = {"llama8b", "smollm", "prefill", "profile"} & set(options.only) and options.device != "cpu"
    bandwidth = copy_bandwidth() if is_timed else None
    failed = []
    for name in slices.pending():
        try:
            with slices.open(name) as part:
                part.note(seed=seed, copy_bytes_per_s=bandwidth)
                for row in _PARTS[name][1](options):
                    part.add(row)
        except AssertionError:  # the other slices are worth the machine's time
            traceback.print_exc()
            failed.append(name)
        if options.device != "cpu":
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
