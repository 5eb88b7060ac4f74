"""Linear layers of few bits in tiles, for `TiledForward`, and for callers that have single products."""

import torch
import torch.nn.functional as F

from specwire.engine.cpu.products import multiply_q4, multiply_q8
from specwire.engine.cpu.tiles import GROUP, MAX_ROWS, NUMBERS_BYTES, ROWS_BYTES
from specwire.engine.cpu.weights import pack_q4, pack_q8
from specwire.engine.kernels.packed_linear import Q4Weight, check_shape, split_columns


class TiledLinear:
    """Weights of 4 bits; scales and minimums are rounded to float16. Sums of 32 products are exact.

    Args:
        weight: of a shape that `check_shape` lets pass.
        bias: [out_features] or None.
    """

    __slots__ = ("bias", "float_bias", "in_features", "num_blocks", "weight")

    def __init__(self, weight: Q4Weight, bias: torch.Tensor | None = None) -> None:
        check_shape(weight.codes.shape)
        self.weight = pack_q4(weight)
        self.bias = bias
        self.float_bias = bias.float() if bias is not None else None
        self.num_blocks, self.in_features = len(self.weight), weight.codes.shape[1]

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`; on one thread."""
        values = x.float().contiguous()
        result = torch.empty(len(x), 16 * self.num_blocks)
        tiles, groups = -(-len(x) // MAX_ROWS), self.in_features // GROUP
        digits = torch.empty(tiles, 2 * groups * ROWS_BYTES, dtype=torch.int8)
        numbers = torch.empty(tiles, groups * NUMBERS_BYTES, dtype=torch.int8)
        fine = torch.empty(len(x) + 1, -(-groups // 64), dtype=torch.int64)
        multiply_q4(
            self.weight.data_ptr(), self.num_blocks, self.in_features, values.data_ptr(), len(x), digits.data_ptr(), numbers.data_ptr(),
            fine.data_ptr(), result.data_ptr(),
        )  # fmt: skip
        return (result if self.float_bias is None else result.add_(self.float_bias)).to(x.dtype)


class TiledHead:
    """The numbers of a `DigitLinear`, for a vocabulary; float32 in, float32 out.

    Args:
        weight: [vocab_size, hidden_size].
    """

    __slots__ = ("columns", "num_blocks", "vocab_size", "weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self.vocab_size = len(weight)
        parts = split_columns(F.pad(weight.float(), (0, 0, 0, -len(weight) % 16)))
        self.columns = parts.columns
        self.weight = pack_q8(parts.codes, parts.scale, parts.exact)
        self.num_blocks = len(self.weight)

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None

    @property
    def bias(self) -> torch.Tensor | None:
        """See `Linear.bias`."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`; on one thread."""
        num_rows, width = x.shape
        values, exact = x.contiguous(), x.index_select(1, self.columns)
        result = torch.empty(num_rows, 16 * self.num_blocks)
        digits = torch.empty(-(-num_rows // MAX_ROWS), 2 * width // GROUP * ROWS_BYTES, dtype=torch.int8)
        corrections = torch.empty(num_rows, 2, dtype=torch.int32)
        units = torch.empty(num_rows)
        multiply_q8(
            self.weight.data_ptr(), self.num_blocks, width, values.data_ptr(), num_rows, digits.data_ptr(), units.data_ptr(),
            corrections.data_ptr(), exact.data_ptr(), len(self.columns), result.data_ptr(),
        )  # fmt: skip
        return result[:, : self.vocab_size]
