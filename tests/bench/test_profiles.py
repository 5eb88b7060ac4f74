"""The time of a profile by kinds of kernels."""

import pytest

from benchmarks.gpu.profiles import Kernel, Share, kind_of, split_time


def test_kernels_that_start_early_count_once() -> None:
    """As a chain has them: each begins while the one before it still runs, and waits for it."""
    kernels = [
        Kernel("Memcpy HtoD (Pinned -> Device)", 0, 2),
        Kernel("add_rms_norm_kernel", 3, 6),
        Kernel("row_linear_kernel", 4, 16),
        Kernel("attend", 15, 25),
        Kernel("nvjet_tst_64x8", 27, 39),  # the head: what follows draws from it
        Kernel("splitKreduce_kernel", 39, 40),
        Kernel("chunk_sample", 40, 43),
        Kernel("Memcpy DtoH (Device -> Pinned)", 43, 44),
        Kernel("Memcpy HtoD (Pinned -> Device)", 144, 145),
    ]
    found = split_time(kernels[::-1])
    assert found == {
        "upload": Share(3, 2), "between kernels": Share(3, 2), "norms": Share(3, 1), "products": Share(10, 1), "attention": Share(9, 1),
        "head": Share(13, 2), "sampling": Share(3, 1), "download": Share(1, 1), "between calls": Share(100, 1),
    }  # fmt: skip
    assert sum(share.us for share in found.values()) == 145


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("row_stream_kernel", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("rotary_kv_write_kernel", "rotary + KV write"),
        ("silu_mul_kernel", "SiLU-mul"),
        ("advance_kernel", "sampling"),
        ("target_chunks", "sampling"),
        ("write_items", "inputs, work list, copies"),
        ("void at::native::vectorized_gather_kernel", "inputs, work list, copies"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
