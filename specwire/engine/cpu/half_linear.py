"""Linear layers in float16 tiles: for `TiledForward`, and for callers that have single products."""

import torch

from specwire.engine.cpu.half_products import multiply_half
from specwire.engine.cpu.half_tiles import MAX_ROWS, TILE_BYTES
from specwire.engine.cpu.half_weights import pack_half


class HalfLinear:
    """Weights of bfloat16's precision and sums of 32 products in float16, those sums in float32: as exact as rows rounded to bfloat16 would be.

    Packs the weight once. A row's result does not depend, bit for bit, on the rows that are computed with it.

    Args:
        weight: [out_features, in_features], in_features a multiple of 32.
        bias: [out_features] or None.
    """

    __slots__ = ("bias", "float_bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = pack_half(weight)
        self.bias = bias
        self.float_bias = bias.float() if bias is not None else None
        self.out_features, self.in_features = weight.shape

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`; on one thread. Float32 rows give a result that is not rounded."""
        values, num_rows = x.float().contiguous(), len(x)
        result = torch.empty(num_rows, self.out_features)
        halves = torch.empty(num_rows, self.in_features, dtype=torch.int32)
        units, scratch = torch.empty(num_rows), torch.empty(MAX_ROWS, TILE_BYTES // 4)
        multiply_half(
            self.weight.data_ptr(), self.out_features, self.in_features, values.data_ptr(), num_rows, halves.data_ptr(), units.data_ptr(),
            scratch.data_ptr(), result.data_ptr(),
        )  # fmt: skip
        return (result if self.float_bias is None else result.add_(self.float_bias)).to(x.dtype)
