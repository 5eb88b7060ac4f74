"""Models of real shapes with random weights: made on the device, or as folders of which services make the weights themselves."""

import json
from pathlib import Path

import torch

from specwire.engine.models.config import ModelConfig, RopeConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model


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
SMOLLM2_135M = llama(49152, 576, 1536, 30, 9, 3, tied=True)
SMALL = llama(8192, 1024, 2048, 4, 16, 4)


def dummy_on_device(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0, std: float = 0.02) -> Decoder:
    """A model whose weights are made on the GPU; same config and seed, same weights."""
    return dummy_model(config, dtype, "cuda", seed, std)
