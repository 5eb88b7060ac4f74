"""Matrix products of the decoder: packed weights on the CPU, and a head with float32 output."""

from typing import Protocol

import torch
import torch.nn.functional as F

_SINGLE_ROW_LIMIT = 1024
"""From this many input features on, oneDNN sums a single row in another order than the rows of a larger product (seen at 1536)."""
_PACK_HINT_ROWS = 16
"""Rows that oneDNN chooses the layout for; measured, 6 to 64 give equal times and 1 a layout that is slow for 2 rows and more."""


class Linear(Protocol):
    """`x @ weight.T + bias` with an output of x's dtype."""

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """[out_features, in_features], contiguous; None where the weight is kept in another form."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """[out_features] or None."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features]."""
        ...


class DenseLinear:
    """Weights of x's dtype.

    On a CPU the weight is kept in oneDNN's blocked layout. The plain layout costs a reordering at every call: with it bfloat16 takes
    1.4 times as long at 1 row and 1.7 times at 6 rows, float32 1.3 times at 4 to 16 rows (at 1 row packing costs float32 a fifth).
    With it a row's result also does not depend, bit for bit, on how many other rows are computed with it.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT_ROWS) if self._packed else weight.contiguous()
        self._bias = bias

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None if self._packed else self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """See `Linear.bias`."""
        return self._bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`."""
        if self._packed:
            if x.shape[0] == 1 and x.shape[1] >= _SINGLE_ROW_LIMIT:
                return torch.ops.mkldnn._linear_pointwise(x.expand(2, -1), self._weight, self._bias, "none", [], "")[:1]
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


class LogitsHead:
    """The product with the vocabulary: accumulates and outputs float32 whatever the weights' dtype.

    Products of two bfloat16 numbers are exact in float32, so a float32 copy of the weight gives the float32-accumulated product;
    CPUs have no bfloat16 product with float32 output. CUDA has one and keeps the weight as it is.

    Args:
        weight: [vocab_size, hidden_size].
        linear: what multiplies float32 rows with the weight instead, with float32 output; for a CPU.
    """

    __slots__ = ("_linear", "_weight")

    def __init__(self, weight: torch.Tensor, linear: Linear | None = None) -> None:
        self._linear = linear or (DenseLinear(weight.float()) if weight.device.type == "cpu" else None)
        self._weight = weight

    @property
    def linear(self) -> Linear | None:
        """What multiplies on a CPU."""
        return self._linear

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """[vocab_size, hidden_size], contiguous; None where something else multiplies."""
        return self._weight if self._linear is None else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 [R, vocab_size]."""
        if self._linear is not None:
            return self._linear(hidden.float())
        if self._weight.dtype == torch.float32:
            return F.linear(hidden, self._weight)
        return torch.mm(hidden, self._weight.t(), out_dtype=torch.float32)

    def write(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """As a call, into logits, float32 [R, vocab_size], contiguous."""
        if self._linear is not None:
            logits.copy_(self._linear(hidden.float()))
        elif self._weight.dtype == torch.float32:
            torch.mm(hidden, self._weight.t(), out=logits)
        else:
            torch.mm(hidden, self._weight.t(), out_dtype=torch.float32, out=logits)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
