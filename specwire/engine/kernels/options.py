"""Choices of the kernels of a backend, so that variants can be measured against each other: the defaults are what was measured to be best so far.

Nothing here knows of Triton.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

if TYPE_CHECKING:
    from specwire.engine.kernels.work_list import AttentionTuning

Early = Literal["never", "rows", "chain", "all"]
MIN_PRODUCT_ROWS = 16
"""Rows that the matrix units take at least."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a kernel is launched, see `early`.

    Args:
        has_instructions: the kernel announces and waits.
        is_early: it is launched before the kernel before has ended. Only with the instructions.
    """

    has_instructions: bool = False
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class LayerTuning:
    """Sizes of the kernels between a layer's products.

    Args:
        norm_numbers_per_warp: of a row; a program is one row, on at most 8 warps.
        silu_block: columns of a program.
        silu_warps: warps of a program.
    """

    norm_numbers_per_warp: int = 512
    silu_block: int = 1024
    silu_warps: int = 4


@dataclass(frozen=True, slots=True)
class ProductTuning:
    """How a product of a few rows is cut, see `skinny_linear`.

    Args:
        features: output features of a program; 64 and more take Hopper's own matrix instructions.
        depth: input features of one loop iteration.
        splits: programs that share a block of features, each with a part of the input features.
        num_stages: depth of the software pipeline.
        num_warps: warps of a program.
        prefetch_depth: input features whose weights are brought to the second-level cache before the kernel before has ended: depth times a
            power of two, or 0.
    """

    features: int = 64
    depth: int = 128
    splits: int = 1
    num_stages: int = 4
    num_warps: int = 4
    prefetch_depth: int = 512


@dataclass(frozen=True, slots=True)
class Product:
    """A weight and a number of rows for which a kernel of our own takes the product.

    Args:
        rows: padded, 16, 32 or 64: it serves more than half as many up to so many, 16 all from 2 on.
        out_features, in_features: of the weight.
        tuning: of the kernel.
    """

    rows: int
    out_features: int
    in_features: int
    tuning: ProductTuning


def padded_rows(num_rows: int) -> int:
    """The size of `Product` that a number of rows belongs to."""
    return max(MIN_PRODUCT_ROWS, 1 << (num_rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What is expected of each stands with the variants that measure it (`benchmarks.gpu.variants`).

    Args:
        early: which kernels start early: "never", for Triton's interpreter; "rows" = products of a single row with a large weight; "chain" = all
            kernels of a layer that stand behind one that announces; "all" = also those behind a product of cuBLAS, which does not announce.
        early_from: numbers of a single row's weight from which its product starts early: behind a kernel that does not announce that costs about
            0.7 us (docs/performance.md), and small ones gain less.
        prefetched_positions: attention brings keys and values of so many positions of each of its items, a power of two, into the
            second-level cache before the kernel before has ended.
        stripe_bytes: most bytes of a product's weight that the kernel before it begins to bring into the second-level cache.
        stripe_tokens: most tokens of a pass that does so.
        fuses_rows: norms, residual sums and SiLU-mul of a single row inside its products: six kernels a layer instead of nine.
        own_head: the product of a single row with the vocabulary is taken as those of the layers are, not by cuBLAS.
        products: weights and rows that a kernel of our own multiplies in place of cuBLAS.
        layer: sizes of the kernels between the products.
        attention: how short rounds' attention is cut; None: the default.
    """

    early: Early = "rows"
    early_from: int = 2**22
    prefetched_positions: int = 0
    stripe_bytes: int = 0
    stripe_tokens: int = 64
    fuses_rows: bool = False
    own_head: bool = False
    products: tuple[Product, ...] = ()
    layer: LayerTuning = LayerTuning()
    attention: "AttentionTuning | None" = None

    def __post_init__(self) -> None:
        assert self.early in get_args(Early), self.early
        assert self.chains or not self.prefetched_positions, f"{self.prefetched_positions} positions, but attention does not start early"

    @classmethod
    def for_device(cls, device: torch.device) -> "KernelOptions":
        """What was measured to be best; GPUs before Hopper and Triton's interpreter know no early start."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
            return cls(early="never")
        from specwire.engine.kernels.tuned_products import HOPPER_PRODUCTS

        return cls(early="chain", early_from=0, products=HOPPER_PRODUCTS)

    @property
    def chains(self) -> bool:
        """All kernels of a layer announce and wait."""
        return self.early in ("chain", "all")

    def layer_start(self, num_tokens: int) -> Start:
        """Of a kernel of a layer that is no product."""
        if not self.chains:
            return Start()
        announced = num_tokens == 1 or any(product.rows == padded_rows(num_tokens) for product in self.products)
        if self.early == "chain" and not announced:
            return Start()  # behind cuBLAS's products most of it gains nothing, and the rest costs 1.3% at 8 sequences
        return Start(has_instructions=True, is_early=True)

    def row_start(self, num_weights: int) -> Start:
        """Of the product of a single row."""
        is_early = self.early != "never" and num_weights >= self.early_from
        return Start(has_instructions=is_early or self.chains, is_early=is_early)

    @property
    def product_start(self) -> Start:
        """Of a product of a few rows: it stands behind a kernel that announces, if any does."""
        return Start(has_instructions=self.chains, is_early=self.chains)
