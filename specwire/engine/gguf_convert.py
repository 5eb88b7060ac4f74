"""Turns a GGUF file into a Hugging Face style folder: config, bfloat16 safetensors, tokenizer; and 4-bit weights as they are, beside it."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from specwire.engine.gguf import GGUFFile
from specwire.engine.gguf_tokenizer import build_tokenizer, tokenizer_config
from specwire.engine.kernels.packed_linear import Q4Weight
from specwire.engine.models.stored_q4 import save_q4
from specwire.errors import InvalidArgumentError, SpecwireError, UnsupportedError

CONVERTER_VERSION = 3
"""Raised whenever the folder made from the same file changes."""

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `folder`, and the
    tensors that the file has in 4 bits into its subfolder (`stored_q4`).

    Raises:
        InvalidArgumentError: the file is damaged or lacks something.
        UnsupportedError: an architecture, tensor type or tokenizer that is not known.
    """
    gguf = GGUFFile(path)
    try:
        config = gguf_config(gguf)
        tensors, blocks = _read_tensors(gguf, config)
        tokenizer, names = build_tokenizer(gguf), tokenizer_config(gguf)
    except (SpecwireError, MemoryError):
        raise
    except Exception as error:  # a value of another kind than it should be; the tokenizer's library raises bare Exception
        raise InvalidArgumentError(f"{path} can't be understood ({type(error).__name__}: {error}); fetch or make it again") from error
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if blocks:
        save_q4(folder, blocks)
    tokenizer.save(str(folder / "tokenizer.json"))
    special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids)
    _write_json(folder / "tokenizer_config.json", names)


def _read_tensors(gguf: GGUFFile, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Q4Weight]]:
    """All in bfloat16, and those that the file has in 4 bits, by their names in `folder`."""
    tensors, blocks = {}, {}
    for name in gguf.tensors:
        place = functools.partial(_place_rows, name=name, config=config)
        tensors[hf_name(name)] = torch.tensor(place(gguf.tensor(name))).to(torch.bfloat16)
        q4 = gguf.q4_blocks(name)
        if q4 is not None:
            blocks[hf_name(name)] = Q4Weight(*(torch.tensor(place(part)) for part in q4))
    return tensors, blocks


def gguf_config(gguf: GGUFFile) -> dict[str, Any]:
    """The content of config.json."""
    metadata = gguf.metadata
    arch = metadata.get("general.architecture")
    if arch not in _MODEL_TYPES:
        raise UnsupportedError(f"architecture {arch!r} of {gguf.path} is not supported; supported: {', '.join(_MODEL_TYPES)}")
    if "rope_freqs.weight" in gguf.tensors:
        raise UnsupportedError(f"{gguf.path} holds rope_freqs.weight (Llama 3.1's position scaling); use the model's Hugging Face folder")

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in metadata:
            raise InvalidArgumentError(f"{gguf.path} lacks the metadata key {arch}.{key}")
        return metadata[f"{arch}.{key}"]

    heads = need("attention.head_count")
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]],
        "model_type": _MODEL_TYPES[arch],
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in gguf.tensors else need("vocab_size"),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": metadata.get(f"{arch}.attention.key_length", need("embedding_length") // heads),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get(f"{arch}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata, arch),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    return config


def _rope_scaling(metadata: dict[str, Any], arch: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.get(f"{arch}.rope.scaling.factor")}
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise UnsupportedError(f"tensor {name} has no place in a Llama-family decoder")


def _place_rows(values: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """The rows of a tensor, or of a part of its blocks, in Hugging Face's order."""
    if config["model_type"] == "llama" and (".attn_q." in name or ".attn_k." in name):
        return _undo_rotary_permutation(values, config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"])
    return values


def _undo_rotary_permutation(values: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's llama interleaves the two halves of each head's rows (rotation of neighbours); Hugging Face keeps halves apart."""
    head_rows = values.shape[0] // num_heads
    return values.reshape(num_heads, head_rows // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
