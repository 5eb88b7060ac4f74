"""The engine alone: checks that graphs equal the same kernels one by one and the torch twins, then times decoding and prefill beside a peer.

The batch is the concurrency: random prompts, greedy, no stop; best of the repeats. `memory` is for a memory checker around this process (see README).
`profile` and `profile-draft` say which kinds of kernels take the time of a decode step, and of a draft model's pass. `round` takes a lockstep round
with drafts apart: host and device, in the engine alone, in a verifier and between its threads.
"""

import argparse
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from benchmarks.gpu import engine_check, peer
from benchmarks.gpu.draft_variants import CASES, Calls
from benchmarks.gpu.engine_alone import Engine
from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, TINY, TINY_DRAFT
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.noise import check_noise
from benchmarks.gpu.profiles import profile
from benchmarks.gpu.round_times import time_rounds
from benchmarks.gpu.sizes import BLOCK_SIZE, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slices, make_parser
from benchmarks.gpu.timing import copy_bandwidth
from specwire.engine.graphs.backends import choose_backend
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import dummy_model

_MAX_ROUND_SEQS = 32
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
    _refuse_cpu("profile", options)
    sizes = chosen_sizes(options)
    for name in _MODELS:
        engine = _make_engine(name, options)
        for count in sizes.concurrency:
            engine.prefill(count)

            def decode(engine: Engine = engine, count: int = count) -> None:
                engine.reopen(count)
                engine.decode(count)

            yield from profile(decode, {"model": name, "c": count}, sizes.num_steps)
        del engine
        torch.cuda.empty_cache()


def _profile_draft_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Where it goes in a pass of llama-1b, in calls as a drafter makes them."""
    _refuse_cpu("profile-draft", options)
    sizes = chosen_sizes(options)
    model = dummy_model(TINY_DRAFT if options.tiny else LLAMA_1B, torch.bfloat16, options.device)
    calls = Calls(model, sizes, CASES, is_tiny=options.tiny)
    runner = calls.make_runner(choose_backend(model.config, model.device, model.dtype, BLOCK_SIZE), joins_passes=False)
    for case in CASES:
        columns = {"model": "llama-1b", "c": case.num_rows, "new_tokens": case.num_tokens, "call_ms": calls.run(runner, case)}
        yield from profile(partial(calls.run, runner, case), columns, calls.num_calls * sizes.num_draft_tokens)


def _round_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Lockstep rounds of llama-8b with drafts, in a verifier without gRPC."""
    sizes = chosen_sizes(options)
    chosen = replace(sizes, concurrency=tuple(count for count in sizes.concurrency if count <= _MAX_ROUND_SEQS))
    return time_rounds(TINY if options.tiny else LLAMA_8B, chosen, options.device, is_tiny=options.tiny)


def _refuse_cpu(name: str, options: argparse.Namespace) -> None:
    if options.device == "cpu":
        raise SystemExit(f"{name} reads the times of CUDA kernels; leave it out on a CPU")


def _make_engine(name: str, options: argparse.Namespace) -> Engine:
    config: ModelConfig = TINY if options.tiny else _MODELS[name]
    engine = Engine(config, chosen_sizes(options), options.device)
    print(f"{name}: weights {engine.load_s:.1f} s, {len(engine.runner.graph_sizes)} graphs {engine.capture_s:.1f} s", flush=True)
    return engine


Part = Callable[[argparse.Namespace], Iterator[dict[str, Any]]]
_PARTS: dict[str, Part] = {
    "noise": _noise_rows,
    "check": _check(engine_check.draw_plain),
    "check-processed": _check(engine_check.draw_processed),
    "check-synthetic": _check(engine_check.draw_plain, is_synthetic=True),
    "llama8b": _decode("llama-8b"),
    "smollm": _decode("smollm2-135m"),
    "prefill": _prefill_rows,
    "profile": _profile_rows,
    "profile-draft": _profile_draft_rows,
    "round": _round_rows,
    "memory": _memory_rows,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the slices asked for."""
    parser = make_parser(__doc__ or "", SECONDS["engine"])
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
                for row in _PARTS[name](options):
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
