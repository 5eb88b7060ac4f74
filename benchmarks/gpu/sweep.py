"""`specwire sweep` on one GPU: throughput against the speed that one user sees, at 1 to 256 requests at once, without drafts, with fixed K, with the
best K by batch size and with adaptive verification.

    python -m benchmarks.gpu.sweep [--out FOLDER]

llama-8b's shape with made-up weights; drafts come from a draft model of llama-1b's shape. Each draft token is accepted with a configured probability
(0.8), whatever it is. About 4 minutes on an H200. Writes sweep-llama8b.json and sweep-llama8b.png; needs matplotlib (`specwire[plots]`).
`--device cpu --tiny --out FOLDER` tries the same on tiny models; its figures say nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, TINY, TINY_DRAFT, save_shape
from benchmarks.gpu.slices import RESULTS
from specwire.engine.models.config import ModelConfig

ACCEPTANCE = 0.8
"""Of each draft token whose predecessors were accepted."""
K = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    target: ModelConfig
    draft: ModelConfig
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    prompts_per_user: int
    fixed: tuple[int, ...]
    kv_cache_memory: int


FULL = Scale(LLAMA_8B, LLAMA_1B, (1, 4, 16, 64, 128, 256), 128, 128, 2, (1, 3, 5), 14 << 30)
SMALL = Scale(TINY, TINY_DRAFT, (1, 4), 16, 16, 2, (1, 5), 16 << 20)


def command(scale: Scale, folder: Path, output: Path, device: str) -> list[str]:
    """The call of `specwire sweep`.

    Args:
        folder: where the models' shapes are written.
        output: where it writes its files.
    """
    target, draft = save_shape(scale.target, folder / "target"), save_shape(scale.draft, folder / "draft")
    speculation = {
        "method": "draft_model", "model": str(draft), "num_speculative_tokens": K,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [ACCEPTANCE**position for position in range(1, K + 1)],
    }  # fmt: skip
    room = max(scale.concurrency)
    sizes = {
        "verifier.max_num_seqs": room, "drafter.max_num_seqs": room, "verifier.max_model_len": scale.input_len + scale.output_len + 64,
        "verifier.max_num_batched_tokens": max(512, 2 * room * (K + 1)), "coordinator.max_queue": 4 * room,
    }  # fmt: skip
    return [
        sys.executable, "-m", "specwire.cli", "sweep", "--config=", f"--model={target}", "--load-format=dummy", "--skip-tokenizer",
        f"--device={device}", f"--dtype={'bfloat16' if device == 'cuda' else 'float32'}", f"--kv-cache-memory={scale.kv_cache_memory}",
        f"--speculative-config={json.dumps(speculation)}", *(f"--set={key}={value}" for key, value in sizes.items()),
        f"--concurrency={','.join(map(str, scale.concurrency))}", f"--fixed={','.join(map(str, scale.fixed))}",
        f"--prompts-per-user={scale.prompts_per_user}", f"--input-len={scale.input_len}", f"--output-len={scale.output_len}",
        f"--vocab-size={scale.target.vocab_size}", "--ignore-eos", f"--output={output}",
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measures, and puts the two files into the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="the same on tiny models, to try it")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder of the results; OUT in the environment, or results/gpu")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        raise SystemExit("--device cpu would take hours with models of real sizes; add --tiny")
    if options.tiny and options.out is None:
        raise SystemExit("--tiny needs --out: its figures must not lie among the results")
    results = Path(options.out or RESULTS)
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        call = command(SMALL if options.tiny else FULL, folder, folder / "sweep", options.device)
        ended = subprocess.run(call, stdin=subprocess.DEVNULL, check=False)
        if ended.returncode:
            raise SystemExit(ended.returncode)
        text = (folder / "sweep" / "sweep.json").read_text().replace(f"{folder}/", "")
        (results / "sweep-llama8b.json").write_text(text.replace(sys.executable, "python"))
        (results / "sweep-llama8b.png").write_bytes((folder / "sweep" / "sweep.png").read_bytes())
    print(f"written to {results / 'sweep-llama8b.json'} and sweep-llama8b.png")


if __name__ == "__main__":
    main()
