"""Shapes of models whose weights are made up."""

import json
from pathlib import Path

from specwire.engine.models.config import ModelConfig, RopeConfig


def llama(
    vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, *, tied: bool = False
) -> ModelConfig:
    """A Llama with a context of 8192."""
    return ModelConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
        tie_word_embeddings=tied,
    )


LLAMA_8B = llama(128256, 4096, 14336, 32, 32, 8)
LLAMA_1B = llama(128256, 2048, 8192, 16, 32, 8, tied=True)
SMOLLM2_135M = llama(49152, 576, 1536, 30, 9, 3, tied=True)
SMALL = llama(8192, 1024, 2048, 4, 16, 4)
TINY = llama(512, 64, 128, 2, 4, 2)
TINY_DRAFT = llama(512, 32, 64, 1, 4, 2, tied=True)


def save_shape(config: ModelConfig, folder: Path) -> Path:
    """A model folder that has config.json and nothing else, for services with `--load-format dummy`; returns it."""
    folder.mkdir(parents=True)
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    return folder
