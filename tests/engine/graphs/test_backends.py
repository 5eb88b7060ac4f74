"""A round takes the twins on a CPU and the kernels on a CUDA device; both are interchangeable."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specwire.engine.graphs.backends import TorchBackend, TritonBackend, choose_backend
from specwire.engine.kernels.paged_attention import paged_attention
from specwire.engine.kernels.ragged_attention import ragged_attention
from specwire.engine.kernels.work_list import AttentionScratch, AttentionTuning, DeviceAttentionPlan

TUNING = AttentionTuning(tile_positions=16, few_items=4, few_min_split=16, num_stages=2, large_stages=2)
CONFIG: Any = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16)


def test_a_cpu_engine_imports_no_triton():
    code = (
        "import sys, torch; from specwire.engine.graphs.backends import choose_backend; "
        "choose_backend(None, torch.device('cpu'), torch.float32, 16).layers.silu_mul(torch.ones(1, 4)); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_device_decides(device):
    backend = choose_backend(CONFIG, torch.device(device), torch.float32, 16)
    assert isinstance(backend, TritonBackend if device == "cuda" else TorchBackend)


def test_attention_with_and_without_a_device_plan():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(8, 16, 2, 2, 16, generator=generator).to(device)
    query = torch.randn(4, 4, 16, generator=generator).to(device)
    cu_seqlens_q = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([70, 20], dtype=torch.int32, device=device)
    block_tables = torch.tensor([[5, 1, 7, 0, 2], [6, 3, 0, 0, 0]], dtype=torch.int32, device=device)
    plan = DeviceAttentionPlan(AttentionScratch(2, 16, device, TUNING), 2, 4, 3, 4)
    plan.update(cu_seqlens_q, seq_lens)
    planned = torch.full_like(query, float("nan"))
    paged_attention(query, cache, block_tables, 0.25, plan, planned)
    torch.testing.assert_close(planned, ragged_attention(query, cache, cu_seqlens_q, seq_lens, block_tables, 0.25), atol=1e-5, rtol=0)
