"""`python -m tests.engine.graphs.hopper CASE`: compiles what rounds and drafting run for Hopper, as no interpreter can; needs no GPU.

Writes each kernel with the most shared memory that it takes, bytes.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

from specwire.engine.graphs.backends import TritonBackend
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.loader import dummy_model
from tests.verifier.harness import tiny_config

_TARGET = GPUTarget("cuda", 90, 32)
CASES: dict[str, tuple[RoundLimits, torch.dtype, int, frozenset[str]]] = {  # limits, dtype, head dimension, what is left out
    "small": (RoundLimits(1, 0, 40, 64), torch.bfloat16, 64, frozenset({"paged_attention.attend"})),  # tests of the kernels compile that one
    "wide": (RoundLimits(3, 3, 64, 96), torch.float32, 128, frozenset()),
}


class Compiler:
    """Compiles what is launched, with the arguments that it is launched with, and runs nothing.

    Args:
        left_out: names of kernels.
    """

    def __init__(self, left_out: frozenset[str]) -> None:
        self.shared_bytes: dict[str, int] = {}
        self._left_out = left_out
        self._backend = make_backend(_TARGET)
        self._seen: set[str] = set()

    def launcher(self) -> Callable[..., None]:
        """In place of `JITFunction.run`."""

        def run(kernel: jit.JITFunction, *args: Any, grid: object, warmup: bool, **given: Any) -> None:
            given |= {"debug": False} | ({"APPROXIMATE": True} if "APPROXIMATE" in given else {})
            bound, specialization, _ = jit.create_function_from_signature(kernel.signature, kernel.params, self._backend)(*args, **given)
            options, signature, constants, attributes = kernel._pack_args(self._backend, given, bound, specialization, None)
            name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
            key = f"{name} {signature} {constants} {attributes} {options}"
            if key in self._seen or name in self._left_out:
                return
            self._seen.add(key)
            compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=_TARGET, options=options.__dict__)
            self.shared_bytes[name] = max(self.shared_bytes.get(name, 0), compiled.metadata.shared)

        return run


def compile_all(case: str) -> dict[str, int]:
    """Shared memory of each kernel of a case."""
    limits, dtype, head_dim, left_out = CASES[case]
    compiler = Compiler(left_out)
    jit.JITFunction.run = compiler.launcher()
    model = dummy_model(tiny_config(head_dim=head_dim, num_heads=8, num_kv_heads=1), dtype)
    cache, backend = KVCache(model.config, 8, dtype), TritonBackend(model.config, model.device)
    RoundRunner(model, cache, limits, backend=backend, use_graphs=False).warm_up()
    num_drafts = max(limits.max_num_draft_tokens, 1)
    DraftRunner(
        model, cache, max_num_seqs=limits.max_num_seqs, max_num_drafts=num_drafts, max_model_len=limits.max_model_len, max_chunk=64, backend=backend,
        use_graphs=False,
    ).warm_up()  # fmt: skip
    return compiler.shared_bytes


if __name__ == "__main__":
    for kernel, shared_bytes in compile_all(sys.argv[1]).items():
        sys.stdout.write(f"{kernel} {shared_bytes}\n")
