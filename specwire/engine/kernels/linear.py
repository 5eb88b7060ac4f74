"""Matrix products of the decoder: packed bfloat16 weights on the CPU, and a head with float32 output."""

import torch
import torch.nn.functional as F

PACK_HINT_ROWS = 6
"""Rows that the packed layout is tuned for: those of a verify step (1 + K) at batch 1."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN computes this weight in bfloat16 natively, so that its packed layout pays."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return on_cpu and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear:
    """`x @ weight.T + bias` with an output of x's dtype.

    On a CPU with native bfloat16 the weight is kept in oneDNN's blocked layout (bit-equal results, about 1.4 times as fast at 6 rows:
    the plain layout is reordered at every call).

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_HINT_ROWS) if self._packed else weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


class LogitsHead:
    """The product with the vocabulary: accumulates and outputs float32 whatever the weights' dtype.

    Products of two bfloat16 numbers are exact in float32, so a float32 copy of the weight gives the float32-accumulated product;
    CPUs have no bfloat16 product with float32 output. CUDA has one and keeps the weight as it is.

    Args:
        weight: [vocab_size, hidden_size].
    """

    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.float() if weight.device.type == "cpu" else weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 [R, vocab_size]."""
        if self._weight.dtype == torch.float32:
            return F.linear(hidden.float(), self._weight)
        return torch.mm(hidden, self._weight.t(), out_dtype=torch.float32)
