"""Linear layers with 4-bit and 8-bit weights on a CPU, over torch's own kernels; both compute in bfloat16 and sum in float32.

A row's result does not depend, bit for bit, on the rows that are computed with it: these kernels sum each row by itself, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specwire.engine.kernels.linear import DenseLinear
from specwire.errors import UnsupportedError

GROUP_SIZE = 32
"""Numbers in a row of a weight that share a scale and a minimum: GGUF's block, and the smallest group of torch's kernel."""
_MIDDLE = 8
"""torch's kernel takes a code q as (q - 8) * scale + zero."""
_ROW_BLOCK = 4
"""Rows that the 4-bit kernel computes at once; threads share (blocks of rows) x (blocks of features)."""
_OUT_MULTIPLE = 16
"""Features of the kernel's smallest block."""
_BASE = 128
"""Of the digits of a `DigitLinear`."""
_LARGEST = _BASE * 127 - 1
_EXACT_SHARE = 32
"""One of so many columns of a `DigitLinear` stays float32."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Q4Weight:
    """A weight of which number k of a row is codes * scale + minimum of its group, k div 32."""

    codes: torch.Tensor  # [out_features, in_features] uint8, 0 to 15
    scale: torch.Tensor  # [out_features, in_features / 32] float16 or float32
    minimum: torch.Tensor  # likewise

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> "Q4Weight":
        """Rounds each number of weight [out_features, in_features] to the nearest of the 16 between its group's least and greatest."""
        groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
        minimum = groups.amin(2, keepdim=True)
        scale = (groups.amax(2, keepdim=True) - minimum) / 15
        codes = ((groups - minimum) / torch.where(scale > 0, scale, 1.0)).round_().to(torch.uint8)
        return cls(codes.flatten(1), scale[:, :, 0], minimum[:, :, 0])

    @classmethod
    def stacked(cls, weights: Sequence["Q4Weight"]) -> "Q4Weight":
        """The rows of all, in order."""
        return cls(*(torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scale", "minimum")))

    def dequantised(self) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        groups = self.codes.float().unflatten(1, (-1, GROUP_SIZE))
        return (groups * self.scale.float()[:, :, None] + self.minimum.float()[:, :, None]).flatten(1)


class Int4Linear:
    """Weights of 4 bits, with a bfloat16 scale and zero point for each 32 of them.

    The codes are kept as they are. The scale, and the zero point minimum + 8 * scale, are rounded to bfloat16, which is what the kernel takes.

    Args:
        weight: of a shape that `check_shape` lets pass.
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_packed", "_scale_and_zero")

    def __init__(self, weight: Q4Weight, bias: torch.Tensor | None = None) -> None:
        check_shape(weight.codes.shape)
        scale, minimum = weight.scale.float(), weight.minimum.float()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        self._scale_and_zero = torch.stack((scale, minimum + _MIDDLE * scale), -1).transpose(0, 1).to(torch.bfloat16).contiguous()
        self._bias = bias

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None

    @property
    def bias(self) -> torch.Tensor | None:
        """See `Linear.bias`."""
        return self._bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`; x is bfloat16."""
        num_rows = x.shape[0]
        rest = num_rows % _ROW_BLOCK
        # In one call a thread gets the whole block of 6 rows and another the rest, and waits: 1.25 times the time of two calls.
        is_cut = rest and num_rows > _ROW_BLOCK
        result = torch.cat((self._product(x[:-rest]), self._product(x[-rest:]))) if is_cut else self._product(x)
        return result if self._bias is None else result + self._bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self._packed, GROUP_SIZE, self._scale_and_zero)


class Int8Linear:
    """Weights rounded to 8 bits, with a bfloat16 scale for each output feature.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_codes", "_scale")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        weight = weight.float()
        # Codes for the scale as it is after rounding.
        self._scale = (weight.abs().amax(1).clamp(min=_TINY) / 127).to(torch.bfloat16)
        self._codes = (weight / self._scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        self._bias = bias

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None

    @property
    def bias(self) -> torch.Tensor | None:
        """See `Linear.bias`."""
        return self._bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`; x is bfloat16."""
        result = torch._weight_int8pack_mm(x, self._codes, self._scale)
        return result if self._bias is None else result + self._bias


@dataclass(frozen=True, slots=True)
class SplitColumns:
    """A weight [out_features, in_features] in 8 bits but for some columns."""

    columns: torch.Tensor  # [n] int64, the exact ones
    exact: torch.Tensor  # [out_features, n] float32
    scale: torch.Tensor  # [out_features] float32
    codes: torch.Tensor  # [out_features, in_features] int8, 0 in the exact columns


def split_columns(weight: torch.Tensor) -> SplitColumns:
    """Takes the largest columns out of a float32 weight, and rounds the others."""
    columns = weight.square().mean(0).topk(weight.shape[1] // _EXACT_SHARE).indices
    rest = weight.index_fill(1, columns, 0.0)
    scale = rest.abs().amax(1).clamp(min=_TINY) / 127
    return SplitColumns(columns, weight.index_select(1, columns), scale, (rest / scale[:, None]).round_().to(torch.int8))


class DigitLinear:
    """Weights rounded to 8 bits, with a scale for each output feature; float32 in, float32 out.

    The largest columns of the weight stay float32: with them in 8 bits the others' steps would be twice as large, and inputs tend to be
    large where the weight is (SmolLM2's head: a fifth of the KL divergence without them, docs/performance.md).

    Each number of a row is taken as two digits of 8 bits (15 in all, of the row's greatest number), so that the product is two of
    integers, which is exact, and which CPUs with VNNI compute at the speed of reading the weight.

    Args:
        weight: [out_features, in_features].
    """

    __slots__ = ("_codes", "_columns", "_exact", "_scale")

    def __init__(self, weight: torch.Tensor) -> None:
        parts = split_columns(weight.float())
        self._columns, self._exact, self._scale, self._codes = parts.columns, DenseLinear(parts.exact), parts.scale, parts.codes

    @staticmethod
    def is_fast() -> bool:
        """Whether this CPU has the instructions; without them integer products may also saturate."""
        return bool(torch.cpu._is_vnni_supported())

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """See `Linear.plain_weight`."""
        return None

    @property
    def bias(self) -> torch.Tensor | None:
        """See `Linear.bias`."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.__call__`; x is float32."""
        num_rows = len(x)
        unit = torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True).clamp_(min=_TINY) / _LARGEST  # [T, 1]
        values = (x / unit).round_().to(torch.int16)
        high = (values + _BASE // 2) >> _BASE.bit_length() - 1
        digits = torch.cat((high, values - high * _BASE)).to(torch.int8)  # [2 T, in_features]
        products = torch._int_mm(digits, self._codes.t()).float()
        result = products[:num_rows].mul_(_BASE).add_(products[num_rows:]).mul_(unit).mul_(self._scale)
        return result.add_(self._exact(x.index_select(1, self._columns)))


def check_shape(shape: Sequence[int]) -> None:
    """Raises UnsupportedError unless torch's 4-bit kernel takes weights of this shape."""
    out_features, in_features = shape
    if out_features % _OUT_MULTIPLE or in_features % GROUP_SIZE:
        raise UnsupportedError(
            f"a weight of shape {out_features} x {in_features} can't be kept in 4 bits: the kernel needs multiples of {_OUT_MULTIPLE} and "
            f"{GROUP_SIZE}; take --weights bf16"
        )
