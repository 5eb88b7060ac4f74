"""What features of draft heads cost: reading them from another process, in its memory and over gRPC, and writing them in the target's passes.

python -m benchmarks.features --threads 2
"""

import argparse
import asyncio
import functools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import grpc
import torch

from benchmarks.report import Bystanders, write_report
from drafter_svc.draft_head import FeatureSpan
from drafter_svc.features import FeatureReader
from drafter_svc.rpc import PulledStream
from specwire.engine.batch import Segment
from specwire.engine.block_manager import BlockManager
from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL
from specwire.engine.features.pages import FeaturePages, make_pool
from specwire.engine.heads.source import FeatureSource
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import open_model
from specwire.engine.runner import ModelRunner, set_num_threads
from specwire.messages import FeatureHandle
from specwire.rpc import DEFAULT_MAX_MESSAGE_BYTES, Server
from specwire.v1 import verifier_pb2 as pb
from specwire.v1 import verifier_pb2_grpc
from specwire.wire import features as wire
from verifier_svc.features import FeatureBooks

WIDTHS = {"SmolLM2-135M": 576, "8B": 4096}
STEPS = [(1, 4), (8, 4), (32, 4), (128, 4), (1, 512)]
"""Sequences, and positions of each: of steps, and of a chunk of a prompt."""
CONTEXT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--passes", type=int, default=25)
    args = parser.parse_args()
    set_num_threads(args.threads)
    bystanders = Bystanders()
    figures: dict[str, Any] = {
        "unit": "ms, median and least of the rounds; of passes CPU time, which other processes change little",
        "reads": [read for width in WIDTHS.items() for read in _measure_reads(*width, args.rounds)],
    }
    figures["passes"] = _measure_passes(args.passes)
    for row in [*figures["reads"], *figures["passes"]]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(write_report("features", figures, bystanders=bystanders))


def _source(width: int, layer_ids: Sequence[int] = (0,), projection: torch.Tensor | None = None) -> FeatureSource:
    return FeatureSource("benchmark", tuple(layer_ids), projection, width, torch.bfloat16, f"benchmark-{width}")


def _measure_reads(model: str, width: int, rounds: int) -> list[dict[str, Any]]:
    """From a process that serves features of 128 sequences."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/v"
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, address, width), daemon=True)
        process.start()
        handles: list[FeatureHandle] = ours.recv()
        source, results = _source(width), []
        readers = {
            path: FeatureReader(
                source, lambda where, name: PulledStream(where, name, source, DEFAULT_MAX_MESSAGE_BYTES, None), uses_memory=path == "memory"
            )
            for path in ("memory", "grpc")
        }
        for reader in readers.values():
            for seq_id, handle in enumerate(handles):
                reader.note(seq_id, handle)
        for num_sequences, num_positions in STEPS:
            spans = [FeatureSpan(seq_id, CONTEXT - num_positions, num_positions) for seq_id in range(num_sequences)]
            times = _interleaved({path: functools.partial(reader.read, spans) for path, reader in readers.items()}, rounds)
            num_bytes = num_sequences * num_positions * width * 2
            results.append({"model": model, "sequences": num_sequences, "positions": num_positions, "kilobytes": num_bytes / 1000} | times)
        for reader in readers.values():
            reader.stop()
        process.terminate()
        process.join()
    return results


def _serve(pipe: Connection, address: str, width: int) -> None:
    asyncio.run(_serve_for_ever(pipe, address, width))


async def _serve_for_ever(pipe: Connection, address: str, width: int) -> None:
    num_sequences, source = max(count for count, _ in STEPS), _source(width)
    blocks = BlockManager(num_sequences * CONTEXT // BLOCK_SIZE)
    config = SimpleNamespace(num_layers=1, hidden_size=width)
    pool = make_pool([source], num_sequences, blocks.num_blocks)
    books = FeatureBooks(FeaturePages([source], config, blocks.num_blocks, BLOCK_SIZE, torch.bfloat16, "cpu", pool), num_sequences, address)  # type: ignore[arg-type]
    books._pages.heads[0].pages.fill_(1)
    segments = []
    for number in range(num_sequences):
        slot = SimpleNamespace(slot=number, epoch=1, is_closed=False, error="", num_computed_tokens=CONTEXT)
        blocks.open(number, range(CONTEXT), str(number).encode())
        assert blocks.reserve(number, CONTEXT)
        books.open(slot)  # type: ignore[arg-type]
        segments.append(SimpleNamespace(slot=slot, samples=False))

    class Servicer(verifier_pb2_grpc.VerifierServiceServicer):
        async def PullFeatures(
            self, request_iterator: AsyncIterator[pb.PullFeaturesRequest], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[pb.PullFeaturesResponse]:
            async for request in request_iterator:
                yield wire.pack_pulled(books.read(wire.unpack_pull(request), DEFAULT_MAX_MESSAGE_BYTES))

    server = Server([address], [], lambda one: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Servicer(), one), DEFAULT_MAX_MESSAGE_BYTES)
    await server.start()
    pipe.send(books.handles(1, segments, blocks))  # type: ignore[arg-type]
    await asyncio.Event().wait()


@torch.inference_mode()
def _measure_passes(rounds: int) -> list[dict[str, Any]]:
    """Passes of the default model in 4 bits, without features, with those of an EAGLE-3 head, and with the last hidden state."""
    model = open_model(resolve_model(DEFAULT_MODEL), load_format="auto", dtype="auto", device="cpu")
    hidden, layers = model.config.hidden_size, model.config.num_layers
    fused = torch.randn(hidden, 3 * hidden).bfloat16()
    sources = {
        "plain": [],
        "three layers, projected": [FeatureSource("eagle3", (2, layers // 2, layers - 3), fused, hidden, torch.bfloat16, "eagle3")],
        "last hidden state": [FeatureSource("eagle", (-1,), None, hidden, torch.bfloat16, "eagle")],
    }
    results = []
    for num_rows, query_len in ((1, 1), (1, 6), (8, 4), (1, 256)):
        runs = {name: _pass(model, features, num_rows, query_len) for name, features in sources.items()}
        results.append({"rows": num_rows, "tokens of each": query_len} | _interleaved(runs, rounds, time.process_time))
    return results


def _pass(model: Decoder, features: Sequence[FeatureSource], num_rows: int, query_len: int) -> Callable[[], object]:
    blocks = (CONTEXT + query_len) // BLOCK_SIZE + 1
    runner = ModelRunner(model, KVCache(model.config, num_rows * blocks, model.dtype, features=features))
    segments = [Segment([7] * query_len, CONTEXT, range(row * blocks, (row + 1) * blocks)) for row in range(num_rows)]
    return lambda: runner.forward(runner.batch(segments))


def _interleaved(runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            started = clock()
            run()
            times[name].append((clock() - started) * 1e3)
    return {name: {"median": round(statistics.median(values), 3), "least": round(min(values), 3)} for name, values in times.items()}


if __name__ == "__main__":
    main()
