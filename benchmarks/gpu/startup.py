"""How long a verifier of llama-8b's shape, with made-up weights, takes from the start of its process until it is ready, and where the time goes.

`cold` has an empty cache of Triton's kernels, `warm` the one that a start before it has filled. After the cold start batches of all sizes decode
behind a coordinator: kernels that are compiled only then show as new entries of the cache.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gpu.engine_models import LLAMA_8B, TINY, save_shape
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.processes import Log, running
from benchmarks.gpu.sizes import Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slices, make_parser
from benchmarks.gpu.stack import UNIX, Peers, drafter_config, no_drafts, serve_coordinator, verifier_config
from specwire.config import VerifierConfig
from specwire.speculative_config import SpeculativeConfig

SLICES = SECONDS["startup"]
MAX_WARM_S = 25.0
"""What is promised of a warm start."""
_CACHE_VARIABLE = "TRITON_CACHE_DIR"
_LATE_TOKENS = 9


async def measure(slices: Slices, names: list[str], sizes: Sizes, device: str, *, is_tiny: bool) -> None:
    """Cold, which fills the cache, then warm."""
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        os.environ[_CACHE_VARIABLE] = str(folder / "triton")
        config = TINY if is_tiny else LLAMA_8B
        speculative = SpeculativeConfig(num_speculative_tokens=sizes.num_draft_tokens)
        verifier = verifier_config(folder, save_shape(config, folder / "model"), sizes, device, speculative)
        if "cold" in names:
            with slices.open("cold") as part:
                async with start(verifier) as (row, log):
                    part.add(row)
                    drafter = drafter_config(folder, sizes, "cpu", speculative)
                    part.note(kernels_compiled_after_ready=await count_late_kernels(Peers(folder, sizes, config.vocab_size, verifier, drafter, log)))
        if "warm" in names:
            with slices.open("warm") as part:
                for number in range(sizes.num_repeats + ("cold" not in names)):
                    async with start(verifier) as (row, _):
                        if number or "cold" in names:
                            part.add(row | {"aim_s": MAX_WARM_S, "is_met": row["ready_s"] <= MAX_WARM_S})


@contextlib.asynccontextmanager
async def start(verifier: VerifierConfig) -> AsyncIterator[tuple[dict[str, Any], Log]]:
    """A running verifier: seconds until it was ready, kernels that it compiled, and what it logged when."""
    num_before, log = _count_kernels(), Log()
    async with running(verifier, log=log):
        ready_s = time.monotonic() - log.started_s
        lines = [[round(seconds, 2), _shortened(line, verifier)] for seconds, _, line in log.lines]
        yield {"ready_s": ready_s, "kernels_compiled": _count_kernels() - num_before, "lines": lines}, log


async def count_late_kernels(peers: Peers) -> int:
    """Kernels that the running verifier compiles for batches of all sizes behind a coordinator."""
    num_ready = _count_kernels()
    async with running(peers.drafter, log=peers.log), serve_coordinator(peers, UNIX, no_drafts(peers.sizes)) as served:
        for count in peers.sizes.concurrency:
            await served.generate(count, _LATE_TOKENS)
    return _count_kernels() - num_ready


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
