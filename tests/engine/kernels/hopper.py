"""`python -m tests.engine.kernels.hopper`: compiles kernels that start early for Hopper, as no interpreter can; needs no GPU.

Writes, for each, what stands before the instruction that waits for the kernel before.
"""

import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specwire.engine.kernels import layer_ops, paged_attention, row_linear, row_stream, skinny_linear

_EFFECT = re.compile(r"griddepcontrol\.\w+|\bprefetch\.L2|cp\.async\.bulk\.prefetch|\bst\.global|\batom\.|\bld\.global|cp\.async\.c[ag]")
_KERNELS: list[tuple[Any, int, dict[str, Any]]] = [  # kernel, warps, arguments: types, or values of constants
    (
        layer_ops.add_rms_norm_kernel,
        4,
        {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "output": "*bf16", "hidden_size": "i32", "eps": "fp32", "ADD": True, "BLOCK": 4096},
    ),
    (
        layer_ops.rotary_kv_write_kernel,
        2,
        {"qkv": "*bf16", "cos": "*bf16", "signed_sin": "*bf16", "positions": "*i64", "slot_mapping": "*i64", "layer_kv": "*bf16", "q_norm": "*bf16"}
        | {"k_norm": "*bf16", "eps": "fp32", "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "NORM": True, "PROGRAM_HEADS": 8},
    ),
    (layer_ops.silu_mul_kernel, 4, {"gate_up": "*bf16", "output": "*bf16", "width": "i32", "BLOCK": 1024}),
    (
        row_linear.row_linear_kernel,
        4,
        {"x": "*bf16", "weight": "*bf16", "bias": None, "output": "*bf16", "out_features": "i32", "IN": 4096, "BIAS": False}
        | {"BLOCK": 4, "DEPTH": 1024},
    ),
    (
        row_stream.row_stream_kernel,
        4,
        {"x": "*bf16", "norm": "*bf16", "eps": "fp32", "weight": "*bf16", "bias": None, "output": "*bf16", "out_features": "i32", "IN": 2048}
        | {"COLUMNS": 2048, "ROWS": 2, "NORM": True, "BIAS": False, "GATES": True, "ADD": False, "BLOCK": 2},
    ),
    (
        skinny_linear.skinny_linear_kernel,
        4,
        {"x": "*bf16", "weight": "*bf16", "bias": None, "output": "*bf16", "partial": "*fp32", "arrived": "*i32", "num_rows": "i32"}
        | {"out_features": "i32", "IN": 4096, "SPAN": 1024, "BIAS": False, "ROWS": 16, "FEATURES": 64, "DEPTH": 128, "SPLITS": 4, "STAGES": 4}
        | {"PREFETCH": 512},
    ),
    (
        paged_attention.attend,
        4,
        {"query": "*bf16", "kv_cache": "*bf16", "block_tables": "*i32", "items": "*i32", "partial_output": "*fp32", "partial_stats": "*fp32"}
        | {"arrived": "*i32", "output": "*bf16", "scale_log2": "fp32", "query_stride": "i32", "table_stride": "i32", "num_scratch_items": "i32"}
        | {"GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "TILE_ROWS": 16, "SMALL_ROWS": 16, "TILE_POSITIONS": 64, "RECORD": 8}
        | {"MERGE_STAGES": 4, "CAUSAL": True, "STAGES": 5, "LARGE_STAGES": 5},
    ),
]


def compile_kernel(kernel: Any, num_warps: int, arguments: dict[str, Any]) -> str:
    """PTX; pointers are aligned to 16 bytes."""
    given = {**arguments, "EARLY": True}
    signature = {name: given[name] if isinstance(given[name], str) else "constexpr" for name in kernel.arg_names}
    constants = {(index,): given[name] for index, name in enumerate(kernel.arg_names) if not isinstance(given[name], str)}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "launch_pdl": True})
    return str(compiled.asm["ptx"])


def main() -> None:
    for kernel, num_warps, arguments in _KERNELS:
        effects = _EFFECT.findall(compile_kernel(kernel, num_warps, arguments))
        sys.stdout.write(" ".join([kernel.__name__, *effects[: effects.index("griddepcontrol.wait")]]) + "\n")


if __name__ == "__main__":
    main()
