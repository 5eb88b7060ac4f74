"""Products of few rows that a kernel of our own takes faster than cuBLAS, as `python -m benchmarks.gpu.variants --only products` found on an H200."""

from specwire.engine.kernels.options import Product, ProductTuning

_SPLIT = ProductTuning(features=64, depth=128, splits=4, num_stages=4)
_WHOLE = ProductTuning(features=64, depth=128, splits=1, num_stages=4)

HOPPER_PRODUCTS = (
    Product(16, 4096, 4096, _SPLIT),  # 0.86 of cuBLAS's time at 8 rows
    Product(16, 28672, 4096, _WHOLE),  # 1.00, and what follows can start early
    Product(16, 4096, 14336, _SPLIT),  # 0.96
    Product(32, 4096, 4096, _SPLIT),  # 0.90 at 32 rows
    Product(32, 4096, 14336, _SPLIT),  # 0.94
)
"""Of llama-8b's shape. Other weights are cuBLAS's until they have been measured."""
