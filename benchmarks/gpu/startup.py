"""How long a verifier of llama-8b's shape, with made-up weights, takes from the start of its process until it is ready, and where the time goes.

`cold` has an empty cache of Triton's kernels, `warm` the one that a start before it has filled. After the cold start one request decodes behind a
coordinator: kernels that are compiled only then show as new entries of the cache.
"""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gpu.engine_models import LLAMA_8B, TINY, save_shape
from benchmarks.gpu.processes import Log, running
from benchmarks.gpu.sizes import Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slice, Slices, make_parser
from benchmarks.gpu.stack import UNIX, Peers, drafter_config, no_drafts, serve_coordinator, verifier_config
from specwire.config import DrafterConfig, VerifierConfig
from specwire.speculative_config import SpeculativeConfig

SLICES = {"cold": 90, "warm": 90}
MAX_WARM_S = 25.0
"""What is promised of a warm start."""
_CACHE_VARIABLE = "TRITON_CACHE_DIR"


async def measure(slices: Slices, names: list[str], sizes: Sizes, device: str, *, is_tiny: bool) -> None:
    """Cold, which fills the cache, then warm."""
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        os.environ[_CACHE_VARIABLE] = str(folder / "triton")
        config = TINY if is_tiny else LLAMA_8B
        speculative = SpeculativeConfig(num_speculative_tokens=sizes.num_draft_tokens)
        verifier = verifier_config(folder, save_shape(config, folder / "model"), sizes, device, speculative)
        drafter = drafter_config(folder, sizes, "cpu", speculative)
        for slice_name in ("cold", "warm"):
            if slice_name in names:
                with slices.open(slice_name) as part:
                    await measure_slice(part, slice_name, verifier, drafter, sizes, config.vocab_size)
            elif slice_name == "cold":
                await start(verifier)


async def measure_slice(part: Slice, name: str, verifier: VerifierConfig, drafter: DrafterConfig, sizes: Sizes, vocab_size: int) -> None:
    """One cold start, or as many warm ones as there are repeats; each is a row."""
    for _ in range(1 if name == "cold" else sizes.num_repeats):
        row = await start(verifier)
        if name == "warm":
            row |= {"aim_s": MAX_WARM_S, "is_met": row["ready_s"] <= MAX_WARM_S}
        part.add(row)
    if name == "cold":
        part.note(kernels_compiled_after_ready=await _count_late_kernels(verifier, drafter, sizes, vocab_size))


async def start(verifier: VerifierConfig) -> dict[str, Any]:
    """Starts it, stops it: seconds until it was ready, kernels that it compiled, and what it logged when."""
    num_before, log = _count_kernels(), Log()
    async with running(verifier, log=log):
        ready_s = time.monotonic() - log.started_s
    lines = [[round(seconds, 2), _shortened(line, verifier)] for seconds, _, line in log.lines if seconds <= ready_s]
    return {"ready_s": ready_s, "kernels_compiled": _count_kernels() - num_before, "lines": lines}


async def _count_late_kernels(verifier: VerifierConfig, drafter: DrafterConfig, sizes: Sizes, vocab_size: int) -> int:
    """In a cache of its own, so that everything is compiled anew."""
    folder = Path(verifier.listen[-1].removeprefix("unix:")).parent
    kept = os.environ[_CACHE_VARIABLE]
    os.environ[_CACHE_VARIABLE] = str(folder / "triton-late")
    try:
        async with running(verifier, replace(drafter), log=(log := Log())):
            num_ready = _count_kernels()
            async with serve_coordinator(Peers(folder, sizes, vocab_size, verifier, drafter, log), UNIX, no_drafts(sizes)) as served:
                for count in sizes.concurrency:
                    await served.generate(count, min(sizes.num_steps, 16))
            return _count_kernels() - num_ready
    finally:
        os.environ[_CACHE_VARIABLE] = kept


def _count_kernels() -> int:
    """Compiled kernels in the cache."""
    return sum(1 for _ in Path(os.environ[_CACHE_VARIABLE]).glob("*/*.cubin"))


def _shortened(line: str, verifier: VerifierConfig) -> str:
    """Without the folder of this run."""
    return line.replace(str(Path(verifier.model).parent), "")


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    slices, options = Slices.parse("startup", parser, arguments)
    if names := slices.pending():
        uvloop.run(measure(slices, names, chosen_sizes(options), options.device, is_tiny=options.tiny))


if __name__ == "__main__":
    main()
