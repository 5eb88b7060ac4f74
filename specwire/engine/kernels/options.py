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


def padded_rows(num_rows: int) -> int:
    """The size of `Product` that a number of rows belongs to."""
    return max(MIN_PRODUCT_ROWS, 1 << (num_rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `benchmarks.gpu.variants` compares.

    Args:
        starts_early: kernels of a pass whose products announce start before the kernel before has ended, see `early`.
        products: weights and rows that a kernel of our own multiplies in place of cuBLAS.
    """

    starts_early: bool = False
    products: tuple[Product, ...] = ()

    @classmethod
    def for_device(cls, device: torch.device) -> "KernelOptions":
        """What was measured to be best; GPUs before Hopper and Triton's interpreter know no early start."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
            return cls()
        from specwire.engine.kernels.tuned_products import HOPPER_PRODUCTS

        return cls(starts_early=True, products=HOPPER_PRODUCTS)

    def is_early(self, num_tokens: int) -> bool:
        """Whether kernels of a pass of so many tokens do. Behind cuBLAS's products, which do not announce, it gains or costs about 1%
        (docs/performance.md)."""
        return self.starts_early and (num_tokens == 1 or any(product.rows == padded_rows(num_tokens) for product in self.products))
