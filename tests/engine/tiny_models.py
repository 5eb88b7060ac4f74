"""Tiny random models of every family, saved as Hugging Face folders, and runs of the engine over whole sequences."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from specwire.engine.batch import Segment
from specwire.engine.block_manager import BlockManager
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.runner import ModelRunner

_COMMON = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}

FAMILIES = {
    "llama": functools.partial(transformers.LlamaConfig),
    "llama-biases": functools.partial(transformers.LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-tied-wide-head": functools.partial(transformers.LlamaConfig, tie_word_embeddings=True, head_dim=32, num_key_value_heads=1),
    "llama-linear-rope": functools.partial(transformers.LlamaConfig, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}),
    "llama-llama3-rope": functools.partial(
        transformers.LlamaConfig,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral": functools.partial(transformers.MistralConfig, sliding_window=None),
    "qwen2": functools.partial(transformers.Qwen2Config, tie_word_embeddings=True),
    "qwen2-yarn": functools.partial(
        transformers.Qwen2Config,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "qwen3": functools.partial(transformers.Qwen3Config, head_dim=32),
    "qwen3-biases": functools.partial(transformers.Qwen3Config, head_dim=16, attention_bias=True),
}


def save_tiny_model(folder: Path, family: str = "llama", seed: int = 0, **overrides: object) -> transformers.PreTrainedModel:
    """Saves a random float32 model with a byte-level tokenizer (ids 0..255 are bytes, then bos, eos, pad); returns transformers' model."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](**_COMMON | overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    return tokenizer


def make_runner(model: Decoder, num_blocks: int = 64) -> tuple[ModelRunner, BlockManager]:
    """A runner over a cache full of NaN: whatever reads a slot that its sequence did not write shows."""
    kv_cache = KVCache(model.config, num_blocks, model.dtype, model.device)
    for layer in kv_cache.layers:
        layer.fill_(float("nan"))
    return ModelRunner(model, kv_cache), BlockManager(num_blocks)


def compute(runner: ModelRunner, manager: BlockManager, chunks: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
    """Computes the next tokens of several open sequences in one pass; returns float32 logits [chunk, vocab] of each."""
    segments = []
    for seq_id, tokens in chunks.items():
        start = manager.num_computed_tokens(seq_id)
        assert manager.reserve(seq_id, start + len(tokens)), f"out of blocks: {manager.num_free_blocks} free"
        segments.append(Segment(tokens, start, manager.block_table(seq_id)))
    batch = runner.batch(segments)
    logits = runner.logits(runner.forward(batch), range(batch.num_tokens))
    for seq_id, tokens in chunks.items():
        manager.set_computed(seq_id, manager.num_computed_tokens(seq_id) + len(tokens))
    return {seq_id: logits[batch.row_starts[row] : batch.row_starts[row + 1]] for row, seq_id in enumerate(chunks)}
