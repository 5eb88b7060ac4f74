"""Programs beside those of a kernel that begin to bring the weight of the product behind it into the second-level cache.

Between products the memory is nearly idle, for the time of a launch and a small kernel. A stripe of the weight, the first numbers of each of its
rows, then waits in the cache for the product, whoever computes it: each of the product's programs begins with its share of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import PREFETCH_ALIGNMENT, prefetch

_LINE = 128
"""Bytes of a line of the cache."""
_ROWS = 256
"""Of the weight, that a program takes at a time."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """What is prefetched of a weight.

    Args:
        weight: [out_features, in_features], contiguous; None: nothing.
        num_bytes: of each row.
    """

    weight: torch.Tensor | None = None
    num_bytes: int = 0

    @classmethod
    def of(cls, weight: torch.Tensor | None, most_bytes: int) -> "Stripe":
        """At most so many bytes in all; nothing of a weight that no aligned stripe has."""
        if weight is None or not most_bytes:
            return cls()
        row_bytes = weight.shape[1] * weight.element_size()
        num_bytes = min(most_bytes // len(weight) // _LINE * _LINE, row_bytes)
        is_aligned = weight.data_ptr() % PREFETCH_ALIGNMENT == 0 and row_bytes % PREFETCH_ALIGNMENT == 0
        return cls(weight, num_bytes) if num_bytes and is_aligned else cls()

    def num_lines(self, width: int) -> int:
        """Lines of so many programs that the kernel is launched with before its own."""
        return 0 if self.weight is None else triton.cdiv(triton.cdiv(len(self.weight), _ROWS), width)

    def arguments(self, width: int) -> dict[str, Any]:
        """The kernel's, by name."""
        num_rows, columns = (0, 0) if self.weight is None else self.weight.shape
        return {
            "following": self.weight,
            "following_rows": num_rows,
            "stripe_bytes": self.num_bytes,
            "FOLLOWING_IN": columns,
            "STRIPE_ROWS": _ROWS,
            "STRIPE_LINES": self.num_lines(width),
        }


@triton.jit
def prefetch_stripe(program, weight, num_rows, stripe_bytes, IN: tl.constexpr, ROWS: tl.constexpr):
    """Waits for nothing."""
    row = program * ROWS + tl.arange(0, ROWS)
    num_bytes = tl.zeros([ROWS], tl.int32) + stripe_bytes
    prefetch(weight + row.to(tl.int64) * IN, num_bytes, row < num_rows)
