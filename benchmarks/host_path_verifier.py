"""The verifier of benchmarks.host_path: real but for its model, whose rounds take a set time on a device that is not there.

python -m benchmarks.host_path_verifier ADDRESS NUM_SEQS ROUNDS_IN_FLIGHT DEVICE_MS MAX_MODEL_LEN
"""

import asyncio
import sys
import time
from collections.abc import Sequence

import torch
import uvloop

from specwire.engine.block_manager import BlockManager
from specwire.engine.graphs.results import Round
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import SentRound
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig, RopeConfig
from specwire.engine.models.loader import dummy_model
from specwire.engine.sampling.segments import SegmentTokens
from specwire.messages import ServiceDescription
from specwire.process import calm_garbage_collector
from specwire.rpc import wait_for_stop_signal
from verifier_svc.loading import LoadedVerifier
from verifier_svc.plan import Segment
from verifier_svc.round_executor import RoundExecutor
from verifier_svc.server import VerifierServer
from verifier_svc.slots import VerifierLimits
from verifier_svc.verifier import Verifier

_K, _MAX_NUM_BATCHED_TOKENS, _VOCAB_SIZE = 5, 4096, 1000
_MODEL = ModelConfig(
    model_type="llama", vocab_size=_VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
    max_position_embeddings=4096, rms_norm_eps=1e-5, rope=RopeConfig(), eos_token_ids=(2,),
)  # fmt: skip


class NoModel(RoundRunner):
    """Packs and uploads rounds, and runs nothing: every row's token is 0."""

    def _run(self, sent: SentRound) -> None:
        self.counts.num_graph_rounds += 1
        self.counts.num_tokens += sent.num_tokens
        self.counts.num_padded_tokens += sent.num_tokens


class TimedRound:
    """A launched round that is done at a set time (time.perf_counter())."""

    def __init__(self, inner: Round, due_s: float) -> None:
        self._inner, self._due_s = inner, due_s

    def is_done(self) -> bool:
        """See `PendingRound.is_done`."""
        return time.perf_counter() >= self._due_s

    def wait(self) -> None:
        """See `PendingRound.wait`."""
        time.sleep(max(0.0, self._due_s - time.perf_counter()))

    def results(self) -> list[SegmentTokens]:
        """See `PendingRound.results`."""
        self.wait()
        return self._inner.results()


class TimedExecutor(RoundExecutor):
    """One round after the other on a device that takes device_ms for each."""

    def __init__(self, runner: RoundRunner, kv_cache: KVCache, max_num_seqs: int, device_ms: float) -> None:
        super().__init__(runner, kv_cache, max_num_seqs)
        self._device_s = device_ms / 1e3
        self._free_s = 0.0

    def launch(self, segments: Sequence[Segment], blocks: BlockManager) -> TimedRound:  # type: ignore[override]  # as good a PendingRound
        """See `Executor.launch`."""
        inner = super().launch(segments, blocks)
        self._free_s = max(self._free_s, time.perf_counter()) + self._device_s
        return TimedRound(inner, self._free_s)


def load(num_seqs: int, num_rounds: int, device_ms: float, max_model_len: int) -> LoadedVerifier:
    """Takes a moment."""
    torch.set_num_threads(1)
    model = dummy_model(_MODEL, torch.float32)
    kv_cache = KVCache(_MODEL, num_seqs * (-(-max_model_len // 16) + 1), torch.float32, "cpu")
    limits = RoundLimits(num_seqs, _K, _MAX_NUM_BATCHED_TOKENS, max_model_len)
    runner = NoModel(model, kv_cache, limits, num_in_flight=num_rounds)
    bounds = VerifierLimits(_VOCAB_SIZE, max_model_len, num_seqs, _K, _MAX_NUM_BATCHED_TOKENS)
    description = ServiceDescription(
        model_id="none", instance_id="host-path", vocab_size=_VOCAB_SIZE, max_model_len=max_model_len, max_num_draft_tokens=_K,
        max_num_seqs=num_seqs, block_size=16, num_blocks=kv_cache.num_blocks, max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
    )  # fmt: skip
    return LoadedVerifier(Verifier(TimedExecutor(runner, kv_cache, num_seqs, device_ms), bounds), description, None)


async def serve(address: str, num_seqs: int, num_rounds: int, device_ms: float, max_model_len: int) -> None:
    """Until SIGTERM."""
    server = VerifierServer([address], lambda: load(num_seqs, num_rounds, device_ms, max_model_len), "host-path", num_rounds)
    stop = asyncio.create_task(wait_for_stop_signal())
    await server.start()
    await server.load()
    calm_garbage_collector()
    await stop
    await server.stop()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
