"""An EAGLE-3 head of a target's shape with made-up weights, as a checkpoint."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from specwire.engine.models.config import ModelConfig

NUM_FEATURE_LAYERS = 3


def save_eagle3_head(target: ModelConfig, draft_vocab_size: int, folder: Path, num_drafts: int) -> Path:
    """One layer of the target's shape, with an embedding of its own, as the target's tensors are in no file; returns the folder."""
    folder.mkdir(parents=True)
    hidden, inner, head_dim = target.hidden_size, target.intermediate_size, target.head_dim
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1 << 20, generator=generator).mul_(0.02).to(torch.bfloat16)

    def weight(rows: int, columns: int) -> torch.Tensor:
        """Repeats of one block: a gigabyte of new random numbers would take longer than it is worth."""
        return block.repeat(-(-rows * columns // len(block)))[: rows * columns].view(rows, columns).contiguous()

    def norm(size: int = hidden) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    layer = "layers.0."
    tensors = {
        "embed_tokens.weight": weight(target.vocab_size, hidden),
        "lm_head.weight": weight(draft_vocab_size, hidden),
        "fc.weight": weight(hidden, NUM_FEATURE_LAYERS * hidden),
        "norm.weight": norm(),
        f"{layer}hidden_norm.weight": norm(),
        f"{layer}input_layernorm.weight": norm(),
        f"{layer}post_attention_layernorm.weight": norm(),
        f"{layer}self_attn.q_proj.weight": weight(target.num_heads * head_dim, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": weight(target.num_kv_heads * head_dim, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": weight(target.num_kv_heads * head_dim, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": weight(hidden, target.num_heads * head_dim),
        f"{layer}mlp.gate_proj.weight": weight(inner, hidden),
        f"{layer}mlp.up_proj.weight": weight(inner, hidden),
        f"{layer}mlp.down_proj.weight": weight(hidden, inner),
    }
    # The drafted ids are spread over the target's.
    ids = torch.arange(draft_vocab_size) * (target.vocab_size // draft_vocab_size)
    tensors["d2t"] = ids - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": [2, target.num_layers // 2, target.num_layers - 3]
        if target.num_layers > 6
        else [0, 1, target.num_layers],
        "num_speculative_tokens": num_drafts,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder
