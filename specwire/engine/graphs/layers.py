"""The layers of a model in a pass: the part that rounds and drafting have in common."""

import torch
import torch.nn.functional as F

from specwire.engine.graphs.backends import Attention, Backend, PassInputs
from specwire.engine.heads.source import FINAL_LAYER
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder


def run_layers(model: Decoder, kv_cache: KVCache, backend: Backend, inputs: PassInputs, attention: Attention) -> torch.Tensor:
    """Writes the tokens' KV and features; returns hidden states after the final norm [T, hidden_size]. `attention` has seen the lengths."""
    ops, linear, weights, config = backend.layers, backend.linear, model.weights, model.config
    num_heads, num_kv_heads, head_dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    num_tokens = len(inputs.token_ids)
    if (fused := backend.fused(model, num_tokens)) is not None:
        return fused(model, kv_cache, backend, inputs, attention)
    residual = F.embedding(inputs.token_ids, weights.embedding)
    taps = kv_cache.taps()
    x = None
    for index, (layer, layer_kv) in enumerate(zip(weights.layers, kv_cache.layers, strict=True)):
        hidden = ops.add_rms_norm(x, residual, layer.input_norm, eps)
        taps.take(index, residual)  # x is in it only now
        qkv = linear(layer.qkv, hidden).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        query = ops.rotary_kv_write(
            qkv, weights.cos, weights.signed_sin, inputs.positions, inputs.slot_mapping, layer_kv, layer.q_norm, layer.k_norm, eps
        )
        attended = attention(query, layer_kv, inputs)
        x = linear(layer.o, attended.view(num_tokens, num_heads * head_dim))
        hidden = ops.add_rms_norm(x, residual, layer.post_norm, eps)
        x = linear(layer.down, ops.silu_mul(linear(layer.gate_up, hidden)))
    hidden = ops.add_rms_norm(x, residual, weights.final_norm, eps)
    taps.take(config.num_layers, residual)
    taps.take(FINAL_LAYER, hidden)
    kv_cache.write_features(taps, inputs.slot_mapping)
    return hidden
