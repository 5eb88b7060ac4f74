"""What rounds and drafting run compiles for Hopper, without a GPU: Triton's interpreter takes more than its compiler does."""

import os
import subprocess
import sys

import pytest

MOST_SHARED_BYTES = 232_448
"""Of a program on Hopper."""
LAYERS = {"layer_ops.add_rms_norm_kernel", "layer_ops.rotary_kv_write_kernel", "layer_ops.silu_mul_kernel", "work_list.write_items"}
ROUNDS = {
    "round_ops.apply_changes_kernel", "round_ops.prepare_kernel", "round_ops.accept_kernel", "filters.find_cuts_kernel", "row_ops.target_chunks",
    "gumbel_argmax.row_argmax", "logprobs.report_kernel",
}  # fmt: skip
DRAFTING = {
    "draft_ops.write_tables_kernel", "draft_ops.prepare_kernel", "draft_sample.chunk_sample", "draft_sample.row_sample", "draft_ops.advance_kernel",
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "others"),
    [
        ("small", set()),  # one sequence without drafts: tensors of one element, and of none
        pytest.param("wide", {"paged_attention.attend"}, marks=pytest.mark.slow),  # the largest tiles of keys and values
    ],
)
def test_all_kernels_compile_and_fit(case: str, others: set[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.engine.graphs.hopper", case], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    shared_bytes = {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}
    assert shared_bytes.keys() == LAYERS | ROUNDS | DRAFTING | others
    assert max(shared_bytes.values()) <= MOST_SHARED_BYTES
