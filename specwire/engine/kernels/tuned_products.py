"""Products of few rows that a kernel of our own takes faster than cuBLAS, and cuts of single rows that are faster than those for most weights, as
`python -m benchmarks.gpu.variants --only products` and `--only rows draft` found on an H200."""

from specwire.engine.kernels.options import Product, ProductTuning, RowCut, RowProduct, RowTuning

_SPLIT = ProductTuning(features=64, depth=128, splits=4, num_stages=4)
_WHOLE = ProductTuning(features=64, depth=128, splits=1, num_stages=4)
_SPLIT_8 = ProductTuning(features=64, depth=128, splits=8, num_stages=4)
_SPLIT_8_SHALLOW = ProductTuning(features=64, depth=64, splits=8, num_stages=6)

_LLAMA_8B = (
    Product(16, 4096, 4096, _SPLIT),  # 0.86 of cuBLAS's time at 8 rows
    Product(16, 28672, 4096, _WHOLE),  # 0.99, and what follows can start early
    Product(16, 4096, 14336, _SPLIT),  # 0.94
    Product(32, 4096, 4096, _SPLIT),  # 0.90 at 32 rows
    Product(32, 4096, 14336, _SPLIT),  # 0.94
)
_LLAMA_1B = (
    Product(16, 3072, 2048, _SPLIT_8_SHALLOW),  # 0.91
    Product(16, 2048, 2048, _SPLIT_8),  # 0.74
    Product(16, 16384, 2048, _WHOLE),  # 0.94
    Product(16, 2048, 8192, _SPLIT_8),  # 0.86
    Product(32, 3072, 2048, _SPLIT_8_SHALLOW),  # 0.98
    Product(32, 2048, 2048, _SPLIT_8),  # 0.88
    Product(32, 16384, 2048, _WHOLE),  # 0.96
    Product(32, 2048, 8192, _SPLIT_8),  # 0.91
)

HOPPER_PRODUCTS = _LLAMA_8B + _LLAMA_1B
"""By shape. Other weights are cuBLAS's until they have been measured; from 64 rows on cuBLAS was faster for all of llama-8b's."""

_WIDE = RowCut(2, 2048)
HOPPER_ROWS = (
    RowProduct(3072, 2048, _WIDE),  # llama-1b's passes of a single row take 0.91 of the time with these four
    RowProduct(2048, 2048, _WIDE),
    RowProduct(16384, 2048, _WIDE),
    RowProduct(2048, 8192, _WIDE),
    RowProduct(128256, 2048, RowTuning(numbers=16384, num_warps=8, num_programs=1056)),  # 0.97 of cuBLAS's time
)
"""By shape, for a single row."""
