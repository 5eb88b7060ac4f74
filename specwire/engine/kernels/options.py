"""Choices of the kernels of a backend, so that they can be measured against each other. Nothing here knows of Triton."""

from dataclasses import dataclass

import torch

MIN_PRODUCT_ROWS = 16
"""Rows that the matrix units take at least."""


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
        rows: padded, 16, 32, 64 or 128: it serves more than half as many up to so many, 16 all from 2 on.
        out_features, in_features: of the weight.
        tuning: of the kernel.
    """

    rows: int
    out_features: int
    in_features: int
    tuning: ProductTuning


@dataclass(frozen=True, slots=True)
class RowCut:
    """How a product of a single row is cut, see `row_linear`.

    Args:
        block: output features of a program.
        depth: input features of one loop iteration; both powers of two.
        num_warps: warps of a program.
    """

    block: int = 4
    depth: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class RowTuning:
    """How a product of one or two rows is streamed, see `row_stream`.

    Args:
        numbers: of the weight that a program loads at a time, a power of two.
        num_warps: warps of a program.
        num_programs: at most; each reads the row once and then takes its share of the features.
    """

    numbers: int = 8192
    num_warps: int = 4
    num_programs: int = 528


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A weight whose products of one or two rows are streamed, or whose products of a single row have a cut of their own.

    Args:
        out_features, in_features: of the weight.
        tuning: of `row_stream`, or of `row_linear` in place of `KernelOptions.row_cut`.
    """

    out_features: int
    in_features: int
    tuning: RowTuning | RowCut = RowTuning()


MAX_STREAMED_ROWS = 2
"""Of `row_stream`."""


def padded_rows(num_rows: int) -> int:
    """The size of `Product` that a number of rows belongs to."""
    return max(MIN_PRODUCT_ROWS, 1 << (num_rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `benchmarks.gpu.variants` compares.

    Args:
        starts_early: kernels of a pass whose products announce start before the kernel before has ended, see `early`.
        products: weights and rows that a kernel of our own multiplies in place of cuBLAS.
        row_cut: of products of a single row that start early, are not streamed and have no cut of their own.
        row_products: weights whose products of up to streamed_rows rows are streamed in place of `row_linear`, the head's too, and cuts of others.
        streamed_rows: 1 or 2.
        fused_rows: passes of so many tokens and fewer, up to streamed_rows, have norms, residual sums and SiLU-mul inside their products, if all
            of these are among row_products.
        attention_split: fewest positions of a piece in steps of few tiles, see `AttentionTuning.few_min_split`; 0 = its default.
    """

    starts_early: bool = False
    products: tuple[Product, ...] = ()
    row_cut: RowCut = RowCut()
    row_products: tuple[RowProduct, ...] = ()
    streamed_rows: int = 1
    fused_rows: int = 0
    attention_split: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.fused_rows <= self.streamed_rows <= MAX_STREAMED_ROWS, f"{self.fused_rows} fused rows, {self.streamed_rows} streamed"

    def row_tuning(self, weight: torch.Tensor) -> RowTuning | None:
        """Of a weight [out_features, in_features] whose rows are streamed; None if they are not."""
        tuning = self._tuning(weight)
        return tuning if isinstance(tuning, RowTuning) else None

    def cut_of(self, weight: torch.Tensor) -> RowCut:
        """Of a weight [out_features, in_features] whose single rows start early."""
        tuning = self._tuning(weight)
        return tuning if isinstance(tuning, RowCut) else self.row_cut

    def _tuning(self, weight: torch.Tensor) -> RowTuning | RowCut | None:
        shape = tuple(weight.shape)
        return next((product.tuning for product in self.row_products if (product.out_features, product.in_features) == shape), None)

    @classmethod
    def for_device(cls, device: torch.device) -> "KernelOptions":
        """What was measured to be best; GPUs before Hopper and Triton's interpreter know no early start."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
            return cls()
        from specwire.engine.kernels.tuned_products import HOPPER_PRODUCTS, HOPPER_ROWS

        return cls(starts_early=True, products=HOPPER_PRODUCTS, row_products=HOPPER_ROWS)

    def is_early(self, num_tokens: int) -> bool:
        """Whether kernels of a pass of so many tokens do. Behind cuBLAS's products, which do not announce, it gains or costs about 1%
        (docs/performance.md)."""
        announces = num_tokens <= max(self.fused_rows, 1) or any(product.rows == padded_rows(num_tokens) for product in self.products)
        return self.starts_early and announces
