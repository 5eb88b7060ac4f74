"""Linear layers of 8 bits in tiles, for draft heads: their weights feel 4."""

import torch
import torch.nn.functional as F

from specwire.engine.cpu.products import multiply_q8
from specwire.engine.cpu.tiles import GROUP, MAX_ROWS, ROWS_BYTES
from specwire.engine.cpu.weights import FEATURES, pack_q8

_TINY = torch.finfo(torch.float32).tiny


class ByteLinear:
    """Weights rounded to 8 bits, with a scale for each output feature; rows are taken in 15 bits, and sums are exact.

    Args:
        weight: [out_features, in_features], in_features a multiple of 32.
        bias: [out_features] or None.
    """

    __slots__ = ("bias", "float_bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        rows = F.pad(weight.float(), (0, 0, 0, -len(weight) % FEATURES))
        scale = rows.abs().amax(1).clamp(min=_TINY) / 127
        self.weight = pack_q8((rows / scale[:, None]).round_().to(torch.int8), scale, rows[:, :0])
        self.bias = bias
        self.float_bias = bias.float() if bias is not None else None

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`; on one thread."""
        values, num_rows = x.float().contiguous(), len(x)
        result = torch.empty(num_rows, FEATURES * len(self.weight))
        digits = torch.empty(-(-num_rows // MAX_ROWS), 2 * self.in_features // GROUP * ROWS_BYTES, dtype=torch.int8)
        corrections, units = torch.empty(num_rows, 2, dtype=torch.int32), torch.empty(num_rows)
        multiply_q8(
            self.weight.data_ptr(), len(self.weight), self.in_features, values.data_ptr(), num_rows, digits.data_ptr(), units.data_ptr(),
            corrections.data_ptr(), 0, 0, result.data_ptr(),
        )  # fmt: skip
        result = result[:, : self.out_features]
        return (result if self.float_bias is None else result + self.float_bias).to(x.dtype)
