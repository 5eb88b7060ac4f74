"""How far logits of few bits, or in bfloat16, are from those of the file's own numbers in float32: on every position of the copy and chat prompts.

python -m benchmarks.engine_cpu_kl --weights int4 bf16

KL divergence of the distributions over the next token, in nats. The file's own numbers are multiplied in float32 with float32 keys and values: for
int4 the distance is that of the arithmetic alone, for bf16 that of rounding the weights to bfloat16, too.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import read_prompts
from benchmarks.report import RESULTS, print_table, write_report
from specwire.engine.batch import Segment
from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL, default_model_file
from specwire.engine.gguf import GGUFFile
from specwire.engine.gguf_convert import hf_name
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import build_decoder, load_model
from specwire.engine.models.stored_q4 import StoredQ4
from specwire.engine.runner import ModelRunner, set_num_threads
from specwire.tokenizer import Tokenizer

PROMISED = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=["int4", "bf16"], help="formats of the weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for engine_cpu_kl.json")
    args = parser.parse_args()
    set_num_threads(args.threads)
    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_folder(folder)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for name in ("copy", "chat") for text in read_prompts(name)]
    exact = exact_decoder(folder)
    expected = [log_probs(exact, prompt) for prompt in prompts]
    results = [{"weights": weights} | compare(expected, load_model(folder, torch.bfloat16, weights=weights), prompts) for weights in args.weights]
    print_table(
        ["weights", "positions", "mean KL", "largest KL", "other first token", "promised"],
        [
            [r["weights"], str(r["positions"]), f"{r['mean_kl']:.6f}", f"{r['largest_kl']:.4f}", str(r["other_first_token"]), f"<= {PROMISED}"]
            for r in results
        ],
    )
    figures = {"unit": "nats, mean over the positions", "model": DEFAULT_MODEL, "promised": f"<= {PROMISED}", "results": results}
    print(f"\nwritten to {write_report('engine_cpu_kl', figures, args.output)}")


def exact_decoder(folder: Path) -> Decoder:
    """The default model with the file's own numbers, in float32."""
    stored, gguf = StoredQ4(folder), GGUFFile(default_model_file())
    names = {hf_name(name): name for name in gguf.tensors}

    def read(name: str) -> torch.Tensor:
        weight = stored.read([name])  # in the order of Hugging Face's rows
        return weight.dequantised() if weight is not None else torch.tensor(gguf.tensor(names[name]))

    return build_decoder(ModelConfig.from_folder(folder), read, torch.float32, "cpu", lambda: "exact")


@torch.inference_mode()
def log_probs(model: Decoder, prompt: list[int]) -> torch.Tensor:
    """Of each position of a prompt, float32 [T, vocab_size]."""
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    runner = ModelRunner(model, KVCache(model.config, num_blocks, model.dtype))
    hidden = runner.forward(runner.batch([Segment(prompt, 0, range(num_blocks))]))
    return runner.logits(hidden, range(len(prompt))).log_softmax(-1)


def compare(expected: list[torch.Tensor], model: Decoder, prompts: list[list[int]]) -> dict[str, Any]:
    """Distances of a model from the expected distributions."""
    divergences, num_others = [], 0
    for exact, prompt in zip(expected, prompts, strict=True):
        ours = log_probs(model, prompt)
        divergences.append((exact.exp() * (exact - ours)).sum(-1))
        num_others += int((exact.argmax(-1) != ours.argmax(-1)).sum())
    values = torch.cat(divergences)
    return {
        "positions": len(values), "mean_kl": values.mean().item(), "largest_kl": values.max().item(), "other_first_token": num_others,
    }  # fmt: skip


if __name__ == "__main__":
    main()
