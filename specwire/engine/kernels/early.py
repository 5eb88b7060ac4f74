"""Early start of kernels (programmatic dependent launch), and what it asks of each kernel that takes part.

A kernel launched with `launch_pdl=True` starts as soon as every program of the kernel before it has announced or ended. If kernels announce at
their beginning, several are on the device at once: all back to the last *barrier*, a kernel launched in the plain way, which starts when
everything before it has ended (PyTorch's embedding, cuBLAS's products; these do not announce, so what follows them starts when they end).

- Every program waits, whatever it then does: its kernel ends after the one before it, and so after all kernels before that. A program that
  returned without waiting would break this chain for everybody behind it.
- Nothing is written before the wait: a kernel further back may still read what was there.
- Read before the wait is only what no kernel since the last barrier writes: weights and tables of angles, which nobody writes, and what the first
  kernels of a pass make (positions, slot mapping, block tables, the attention's work list), because the embedding stands behind them.
- Anything may be prefetched into the second-level cache: it is the one place where all multiprocessors see a write.

Both instructions do nothing in a kernel that was launched in the plain way. Triton's interpreter has neither: there EARLY is False.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PREFETCH_ALIGNMENT = 16
"""Of addresses and sizes, in bytes."""


@triton.jit
def announce(EARLY: tl.constexpr):
    """The next kernel may start, once all programs of this one have begun."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """All kernels before have ended, and what they wrote is seen."""
    if EARLY:
        gdc_wait()


@triton.jit
def prefetch(pointers, num_bytes, inside):
    """Starts to bring num_bytes from each of these addresses into the second-level cache; both are multiples of 16."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [pointers.to(tl.int64), num_bytes, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
