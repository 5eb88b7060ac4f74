"""The layers in a pass of one or two tokens, with norms, residual sums and SiLU-mul inside the products: six kernels a layer instead of nine."""

import torch
import torch.nn.functional as F

from specwire.engine.graphs.backends import Attention, Backend, PassInputs
from specwire.engine.heads.source import FINAL_LAYER
from specwire.engine.kernels.linear import Linear
from specwire.engine.kernels.options import KernelOptions, RowTuning
from specwire.engine.kernels.row_stream import row_stream
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder


def can_fuse(model: Decoder, options: KernelOptions, num_tokens: int) -> bool:
    """Whether the options ask for it."""
    if not 1 <= num_tokens <= options.fused_rows:
        return False
    layer = model.weights.layers[0]
    weights = [linear.plain_weight for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    is_gated = layer.gate_up.bias is None  # else values would need their own
    return is_gated and all(weight is not None and options.row_tuning(weight) is not None for weight in weights)


def run_fused_rows(
    model: Decoder, kv_cache: KVCache, backend: Backend, inputs: PassInputs, attention: Attention, options: KernelOptions
) -> torch.Tensor:
    """See `layers.run_layers`; what is rounded there is rounded here."""
    weights, config = model.weights, model.config
    num_heads, num_kv_heads, head_dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    num_tokens = len(inputs.token_ids)
    early = options.is_early(num_tokens)

    def normed(norm: torch.Tensor, linear: Linear, *, gates: bool = False) -> torch.Tensor:
        weight, tuning = _plain(linear, options)
        return row_stream(residual, weight, linear.bias, tuning=tuning, norm=norm, eps=eps, gates=gates, early=early)

    def add(x: torch.Tensor, linear: Linear) -> None:
        weight, tuning = _plain(linear, options)
        row_stream(x, weight, linear.bias, tuning=tuning, residual=residual, early=early)

    residual = F.embedding(inputs.token_ids, weights.embedding)
    taps = kv_cache.taps()
    for index, (layer, layer_kv) in enumerate(zip(weights.layers, kv_cache.layers, strict=True)):
        taps.take(index, residual)
        qkv = normed(layer.input_norm, layer.qkv).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        query = backend.layers.rotary_kv_write(
            qkv, weights.cos, weights.signed_sin, inputs.positions, inputs.slot_mapping, layer_kv, layer.q_norm, layer.k_norm, eps
        )
        add(attention(query, layer_kv, inputs).view(num_tokens, num_heads * head_dim), layer.o)
        add(normed(layer.post_norm, layer.gate_up, gates=True), layer.down)
    hidden = backend.layers.add_rms_norm(None, residual, weights.final_norm, eps)
    taps.take(config.num_layers, residual)
    taps.take(FINAL_LAYER, hidden)
    kv_cache.write_features(taps, inputs.slot_mapping)
    return hidden


def _plain(linear: Linear, options: KernelOptions) -> tuple[torch.Tensor, RowTuning]:
    weight = linear.plain_weight
    assert weight is not None, "rows are fused where weights are plain, as they are on CUDA"
    tuning = options.row_tuning(weight)
    assert tuning is not None, f"a weight {tuple(weight.shape)} is not among the streamed ones"
    return weight, tuning
