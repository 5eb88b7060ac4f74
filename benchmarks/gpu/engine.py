"""The engine alone on a GPU: checks that graphs equal eager kernels, then times decoding and prefill of dummy models beside a peer.

`python -m benchmarks.gpu.engine [--only check|llama8b|smollm|prefill|profile ...] [--concurrency 1 8 ...]`; each part is a file of results,
written after every row. The batch is the concurrency: 512-token random prompts, 128 decode steps after the first token, greedy, no stop; best
of three. The peer's figures (vLLM 0.26.0) were taken the same way on the same kind of GPU, with weights of the same shapes.
"""

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.engine_check import check_graphs
from benchmarks.gpu.engine_models import LLAMA_8B, SMOLLM2_135M, dummy_on_device
from benchmarks.gpu.timing import copy_bandwidth, write_report
from benchmarks.report import print_table
from specwire.engine.graphs.results import Round
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

_RESULTS = Path(__file__).parent.parent / "results" / "gpu"
_PROMPT, _STEPS, _BLOCK = 512, 128, 16
_CHUNK = 16384
_PEER_TOK_S = {
    "llama-8b": {1: 202, 8: 1563, 32: 5440, 128: 14885, 256: 18956},
    "smollm2-135m": {1: 622, 8: 4755, 32: 15581, 128: 32392, 256: 50487},
}
_PEER_PREFILL_S = {1: 0.017, 8: 0.100, 32: 0.364, 128: 1.46, 256: 2.96}
_GEMM_MS = {1: 3.97, 8: 4.01, 32: 4.16, 128: 4.63, 256: 6.03}
"""Linear layers and head of llama-8b alone, through cuBLAS in one graph."""


class Engine:
    """A dummy model with room for some sequences; slot i owns a fixed row of blocks.

    Args:
        config: shape of the model.
        num_seqs: most sequences.
        num_draft_tokens: K_max that the graphs are made for.
    """

    def __init__(self, config: ModelConfig, num_seqs: int, num_draft_tokens: int) -> None:
        started = time.perf_counter()
        self.model = dummy_on_device(config)
        length = _PROMPT + _STEPS + 2 + num_draft_tokens
        blocks = -(-length // _BLOCK)
        order = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).tolist()
        self.tables: list[list[int]] = order
        cache = KVCache(config, num_seqs * blocks, torch.bfloat16, "cuda")
        torch.cuda.synchronize()
        loaded = time.perf_counter()
        self.runner = RoundRunner(self.model, cache, RoundLimits(num_seqs, num_draft_tokens, _CHUNK, blocks * _BLOCK))
        self.runner.capture()
        torch.cuda.synchronize()
        self.load_s, self.capture_s = loaded - started, time.perf_counter() - loaded
        params = SamplingParams(temperature=0.0, max_tokens=None)
        self.sampling = SlotSampling(params, key=1, vocab_size=config.vocab_size, token_ids=[0], num_prompt_tokens=1)

    def prefill(self, count: int) -> float:
        """Seconds from the first launch until the first tokens of `count` new prompts are on the host."""
        prompts = torch.randint(3, self.model.config.vocab_size, (count, _PROMPT)).tolist()
        for slot in range(count):
            self.runner.open(slot, self.sampling)
        torch.cuda.synchronize()
        started = time.perf_counter()
        step = _CHUNK // _PROMPT
        chunks = [range(begin, min(begin + step, count)) for begin in range(0, count, step)]
        self._run([RoundRow(slot, 0, prompts[slot], 0, self._table(slot, _PROMPT), self.sampling) for slot in chunk] for chunk in chunks)
        return time.perf_counter() - started

    def decode(self, count: int) -> float:
        """Seconds of the steps behind a prefill, two in flight, each from tokens that only the device has."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._run(
            [RoundRow(slot, position, (0,), 0, self._table(slot, position + 1), self.sampling, from_device=True) for slot in range(count)]
            for position in range(_PROMPT, _PROMPT + _STEPS)
        )
        return time.perf_counter() - started

    def _table(self, slot: int, num_tokens: int) -> list[int]:
        return self.tables[slot][: -(-num_tokens // _BLOCK)]

    def _run(self, rounds: Iterator[list[RoundRow]]) -> None:
        before: Round | None = None
        for rows in rounds:
            launched = self.runner.launch(rows)
            if before is not None:
                _check(before)
            before = launched
        assert before is not None
        _check(before)


def _check(launched: Round) -> None:
    assert all(not row.is_bad and len(row.token_ids) == 1 for row in launched.results())


def _decode_rows(name: str, config: ModelConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    engine = Engine(config, max(options.concurrency), options.num_draft_tokens)
    print(f"{name}: weights {engine.load_s:.1f} s, {len(engine.runner.graph_sizes)} graphs {engine.capture_s:.1f} s", flush=True)
    for count in options.concurrency:
        engine.prefill(count)
        engine.decode(count)
        compiled: list[object] = []
        triton.knobs.compilation.listener = lambda into=compiled, **event: into.append(event)
        prefill_s, decode_s = [], []
        for _ in range(3):
            prefill_s.append(engine.prefill(count))
            decode_s.append(engine.decode(count))
        triton.knobs.compilation.listener = None
        tok_s, peer = count * _STEPS / min(decode_s), _PEER_TOK_S[name].get(count, float("nan"))
        row = {"c": count, "ms_per_token": min(decode_s) / _STEPS * 1e3, "tok_s": tok_s, "peer_tok_s": peer, "x_peer": tok_s / peer}
        if name == "llama-8b":
            peer_s = _PEER_PREFILL_S.get(count, float("nan"))
            row |= {"gemm_ms": _GEMM_MS.get(count, float("nan")), "prefill_s": min(prefill_s), "peer_prefill_s": peer_s}
        yield row | {"launch_ms": _launch_ms(engine, count), "compiled_after_ready": len(compiled), "capture_s": engine.capture_s}


def _prefill_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prompts of llama-8b, in rounds of up to 16,384 tokens."""
    engine = Engine(LLAMA_8B, max(options.concurrency), options.num_draft_tokens)
    for count in options.concurrency:
        engine.prefill(count)
        seconds, peer_s = min(engine.prefill(count) for _ in range(3)), _PEER_PREFILL_S.get(count, float("nan"))
        yield {"c": count, "prefill_s": seconds, "tok_s": count * _PROMPT / seconds, "peer_prefill_s": peer_s, "x_peer": peer_s / seconds}


def _launch_ms(engine: Engine, count: int) -> float:
    """Host time of launching a step."""
    engine.prefill(count)
    rows = [RoundRow(slot, _PROMPT, (0,), 0, engine.tables[slot], engine.sampling, from_device=True) for slot in range(count)]
    engine.runner.launch(rows).results()
    times = []
    for _ in range(10):
        started = time.perf_counter()
        launched = engine.runner.launch(rows)
        times.append(time.perf_counter() - started)
        launched.results()
    return sorted(times)[5] * 1e3


def _profile_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Where the device's time of a decode step goes."""
    for name, config in (("llama-8b", LLAMA_8B), ("smollm2-135m", SMOLLM2_135M)):
        engine = Engine(config, max(options.concurrency), options.num_draft_tokens)
        for count in options.concurrency:
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
            yield {"case": f"{name} c={count}: idle", "us_per_step": (span - busy) / _STEPS, "calls": len(events) / _STEPS}
            for kernel, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]:
                yield {"case": f"{name} c={count}: {kernel}", "us_per_step": sum(times) / _STEPS, "calls": len(times) / _STEPS}
        del engine
        torch.cuda.empty_cache()


_PARTS = {
    "check": lambda options: check_graphs(),
    "llama8b": lambda options: _decode_rows("llama-8b", LLAMA_8B, options),
    "smollm": lambda options: _decode_rows("smollm2-135m", SMOLLM2_135M, options),
    "prefill": _prefill_rows,
    "profile": _profile_rows,
}


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--num-draft-tokens", type=int, default=5, help="K_max that the graphs are made for")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", _RESULTS)))
    parser.add_argument("--commit", default="unknown", help="what is measured, where the machine has no checkout")
    options = parser.parse_args()
    seed = time.time_ns()
    random.seed(seed)
    torch.manual_seed(seed)
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in options.only:
        started, rows = time.monotonic(), []
        for row in _PARTS[name](options):
            rows.append(row)
            write_report(options.out, f"engine-{name}", options.commit, {"seed": seed, "copy_bytes_per_s": bandwidth, "rows": rows})
            print(row, flush=True)
        torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - started:.0f} s")
        header = list(dict.fromkeys(key for row in rows for key in row))
        print_table(header, [[f"{row[key]:.4g}" if isinstance(row.get(key), float) else str(row.get(key, "")) for key in header] for row in rows])


if __name__ == "__main__":
    main()
