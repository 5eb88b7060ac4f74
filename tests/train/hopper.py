"""`python -m tests.train.hopper`: compiles the training kernel for Hopper, as no interpreter can; needs no GPU. Writes its PTX's line count."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specwire.train.fused_terms import BLOCK, _loss_terms

_POINTERS = {"logits": "*fp32", "log_target": "*fp32", "factors": "*fp32", "gradient": "*fp32", "sums": "*fp32", "best": "*i64"}
_NUMBERS = {"size": "i32", "inv_temperature": "fp32", "kl_weight": "fp32", "tv_weight": "fp32"}


def compile_kernel(*, accumulate: bool) -> str:
    """PTX."""
    constants = {"ACCUMULATE": accumulate, "BLOCK": BLOCK}
    signature = {**_POINTERS, **_NUMBERS, **dict.fromkeys(constants, "constexpr")}
    places = {name: (index,) for index, name in enumerate(_loss_terms.arg_names)}
    source = ASTSource(fn=_loss_terms, signature=signature, constexprs={places[name]: value for name, value in constants.items()})
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"])


if __name__ == "__main__":
    for accumulate in (False, True):
        sys.stdout.write(f"{len(compile_kernel(accumulate=accumulate).splitlines())}\n")
