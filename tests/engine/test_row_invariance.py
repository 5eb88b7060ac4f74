"""A token's numbers do not depend on which tokens, drafts and other sequences are computed with it.

Everywhere they agree within a tolerance. Bit for bit they agree where that was measured: x86 CPUs of Intel with AVX-512. Elsewhere other
matrix kernels may run, and the sampling contract's excuse for near-ties applies.
"""

import platform
from pathlib import Path

import pytest
import torch

from specwire.engine.batch import Segment
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig, RopeConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.runner import ModelRunner

NUM_TOKENS = 600
SCHEDULES = {
    "chunks of 100": ([100] * 6, 0),
    "chunks of 17 beside others": ([17] * 35 + [5], 2),
    "decode over the borders of padding": ([250] + [1] * 12 + [245] + [1] * 10 + [83], 0),
    "verify steps of mixed width beside others": ([400, 6, 6, 1, 3, 2, 6, 5, 171], 3),
}
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=512,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=3,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100_000.0),
    tie_word_embeddings=True,
)


def is_measured_cpu() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    vendor = cpuinfo.read_text() if cpuinfo.is_file() else platform.processor()
    return "GenuineIntel" in vendor and "AVX512" in torch.backends.cpu.get_cpu_capability()


def logits_of(model: Decoder, chunks: list[int], num_others: int) -> torch.Tensor:
    """All tokens' logits, computed chunk by chunk beside decode and verify rows of other sequences, short and long ones."""
    tokens = torch.randint(0, CONFIG.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    num_blocks = NUM_TOKENS // 16 + 1
    runner = ModelRunner(model, KVCache(CONFIG, num_blocks * (1 + num_others), model.dtype))
    tables = [list(range(num_blocks * index, num_blocks * (index + 1))) for index in range(1 + num_others)]
    others = [Segment(list(range(1 + 3 * index)), 230 * index, table) for index, table in enumerate(tables[1:])]
    collected, position = [], 0
    for size in chunks:
        segment = Segment(tokens[position : position + size], position, tables[0])
        batch = runner.batch([*others, segment])
        collected.append(runner.logits(runner.forward(batch), range(batch.row_starts[-2], batch.num_tokens)))
        position += size
    assert position == NUM_TOKENS
    return torch.cat(collected)


@pytest.mark.timeout(600)  # passes in tiles are compiled first, 15 s of CPU time
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, ""), (torch.bfloat16, ""), (torch.bfloat16, "bf16"), (torch.bfloat16, "int4")],
    ids=["float32", "bfloat16", "bf16", "int4"],
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_do_not_depend_on_the_schedule(dtype, weights, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = dummy_model(CONFIG, dtype, std=0.05, weights=weights)
        reference = logits_of(model, [NUM_TOKENS], 0)
        assert reference.std() > 0.5, "the comparison needs logits of some size"
        for name, (chunks, num_others) in SCHEDULES.items():
            logits = logits_of(model, chunks, num_others)
            torch.testing.assert_close(
                logits, reference, atol=1e-4 if dtype == torch.float32 else 0.3, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
            )
            if is_measured_cpu():
                assert torch.equal(logits, reference), f"{name}: {(logits != reference).any(1).sum()} of {NUM_TOKENS} rows differ in their last bits"
    finally:
        torch.set_num_threads(before)
