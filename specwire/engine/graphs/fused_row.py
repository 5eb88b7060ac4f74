"""The layers in a pass of one token, with norms, residual sums and SiLU-mul inside the products: six kernels a layer."""

import torch
import torch.nn.functional as F

from specwire.engine.graphs.backends import Attention, Backend, PassInputs
from specwire.engine.heads.source import FINAL_LAYER
from specwire.engine.kernels.fused_row import normed_row_linear
from specwire.engine.kernels.linear import Linear
from specwire.engine.kernels.options import KernelOptions
from specwire.engine.kernels.row_linear import row_linear
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder


def run_fused_row(
    model: Decoder, kv_cache: KVCache, backend: Backend, inputs: PassInputs, attention: Attention, *, options: KernelOptions
) -> torch.Tensor:
    """See `layers.run_layers`; what is rounded there is rounded here."""
    weights, config = model.weights, model.config
    num_heads, num_kv_heads, head_dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps

    def normed(norm: torch.Tensor, linear: Linear, *, gates: bool = False) -> torch.Tensor:
        weight = _plain(linear)
        return normed_row_linear(residual, norm, eps, weight, linear.bias, start=options.row_start(weight.numel()), gates=gates)

    def add(x: torch.Tensor, linear: Linear) -> None:
        weight = _plain(linear)
        row_linear(x, weight, linear.bias, start=options.row_start(weight.numel()), residual=residual)

    residual = F.embedding(inputs.token_ids, weights.embedding)
    taps = kv_cache.taps()
    for index, (layer, layer_kv) in enumerate(zip(weights.layers, kv_cache.layers, strict=True)):
        taps.take(index, residual)
        qkv = normed(layer.input_norm, layer.qkv).view(1, num_heads + 2 * num_kv_heads, head_dim)
        query = backend.layers.rotary_kv_write(
            qkv, weights.cos, weights.signed_sin, inputs.positions, inputs.slot_mapping, layer_kv, layer.q_norm, layer.k_norm, eps,
            layer.o.plain_weight,
        )  # fmt: skip
        add(attention(query, layer_kv, inputs).view(1, num_heads * head_dim), layer.o)
        add(normed(layer.post_norm, layer.gate_up, gates=True), layer.down)
    hidden = backend.layers.add_rms_norm(None, residual, weights.final_norm, eps, weights.head.plain_weight)
    taps.take(config.num_layers, residual)
    taps.take(FINAL_LAYER, hidden)
    kv_cache.write_features(taps, inputs.slot_mapping)
    return hidden


def _plain(linear: Linear) -> torch.Tensor:
    weight = linear.plain_weight
    assert weight is not None, "rows are fused where weights are plain, as they are on CUDA"
    return weight
