"""Writes small GGUF files for tests."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q6_K": 14, "Q8_0": 8, "BF16": 30}


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str, bytes]], version: int = 3) -> None:
    """tensors: name -> (shape in row-major order, type name, stored bytes)."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_string(key) + _typed(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        header += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", TYPES[kind], len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)


def float32_tensor(values: np.ndarray) -> tuple[tuple[int, ...], str, bytes]:
    """A tensor stored as F32."""
    return values.shape, "F32", values.astype("<f4").tobytes()


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            kind, items = (8, [_string(item) for item in value]) if isinstance(value[0], str) else (5, [struct.pack("<i", item) for item in value])
            return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    raise TypeError(value)


def write_tiny_gguf(path: Path, bos: int = 0) -> None:
    """A model without layers."""
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.block_count": 0,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.bos_token_id": bos,
    }
    write_gguf(path, metadata, {"token_embd.weight": float32_tensor(np.ones((2, 8))), "output_norm.weight": float32_tensor(np.ones(8))})
