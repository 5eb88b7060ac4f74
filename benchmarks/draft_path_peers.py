"""The verifier and the drafter of benchmarks.draft_path: real but for their models, whose passes take a set time on devices that are not there.

python -m benchmarks.draft_path_peers verifier|drafter ADDRESS NUM_SEQS MAX_MODEL_LEN SLOWDOWN

Passes take what they took on an H200 (llama-8b and llama-1b, one process each), times SLOWDOWN.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import torch
import uvloop

from benchmarks.host_path_verifier import NoModel, TimedRound
from drafter_svc.draft_model import DraftModel
from drafter_svc.server import DrafterServer
from specwire.config import DrafterConfig
from specwire.engine.block_manager import BlockManager
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.graphs.results import Round
from specwire.engine.graphs.tensors import RoundLimits
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

K, VOCAB_SIZE = 5, 1000
_MAX_NUM_BATCHED_TOKENS, _PREFILL_CHUNK, _NUM_ROUNDS = 16384, 1024, 2
_ACCEPTED = (5, 3, 0, 4, 2, 1, 5, 2)
"""Drafts accepted, one row after the other: 2.75 in the mean."""
_MODEL = ModelConfig(
    model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
    max_position_embeddings=4096, rms_norm_eps=1e-5, rope=RopeConfig(), eos_token_ids=(2,),
)  # fmt: skip


def verify_ms(num_tokens: int) -> float:
    """One pass of the target."""
    return 4.2 + 0.02 * num_tokens


def draft_ms(num_rows: int) -> float:
    """One captured pass of the draft model."""
    return 1.0 + 0.008 * num_rows


def chunk_ms(num_tokens: int) -> float:
    """A pass of the draft model kernel by kernel: its launches take most of it."""
    return 5.0 + 0.005 * num_tokens


class _Pending(TimedRound):
    """With every row's accepted drafts as the list above has them."""

    def __init__(self, inner: Round, due_s: float, segments: Sequence[Segment], first: int) -> None:
        super().__init__(inner, due_s)
        self._segments, self._first = segments, first

    def results(self) -> list[SegmentTokens]:
        """See `PendingRound.results`."""
        results = super().results()
        for index, segment in enumerate(self._segments):
            if segment.draft_tokens and segment.samples:
                accepted = segment.draft_tokens[: _ACCEPTED[(self._first + index) % len(_ACCEPTED)]]
                results[index] = SegmentTokens(len(accepted), (*accepted, 0), False, None, None)
        return results


class _Executor(RoundExecutor):
    """One round after the other on a device that takes `verify_ms`."""

    def __init__(self, runner: NoModel, kv_cache: KVCache, max_num_seqs: int, slowdown: float) -> None:
        super().__init__(runner, kv_cache, max_num_seqs)
        self._slowdown, self._free_s, self._num_rounds = slowdown, 0.0, 0

    def launch(self, segments: Sequence[Segment], blocks: BlockManager) -> _Pending:  # type: ignore[override]  # as good a PendingRound
        """See `Executor.launch`."""
        inner = super().launch(segments, blocks)
        took_s = self._slowdown * verify_ms(sum([segment.num_tokens for segment in segments])) / 1e3
        self._free_s = max(self._free_s, time.perf_counter()) + took_s
        self._num_rounds += 1
        return _Pending(inner, self._free_s, segments, self._num_rounds)


class _Forward:
    """See `DraftForward`: drafts token 0. Rows that miss more than K + 1 tokens are computed kernel by kernel first, as on a device."""

    def __init__(self, slowdown: float) -> None:
        self.counts = PassCounts()
        self._slowdown = slowdown

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """See `DraftForward.open`."""

    def compute(self, rows: Sequence[DraftRow]) -> None:
        """See `DraftForward.compute`."""
        if rows:
            self.counts.num_eager_passes += 1
            time.sleep(self._slowdown * chunk_ms(sum([len(row.token_ids) for row in rows])) / 1e3)

    def launch(self, rows: Sequence[DraftRow]) -> Callable[[], list[DraftTokens]]:
        """See `DraftForward.launch`."""
        self.compute([row for row in rows if len(row.token_ids) > K + 1])
        most = max(row.num_drafts for row in rows)
        due_s = time.perf_counter() + self._slowdown * sum(draft_ms(sum([row.num_drafts > j for row in rows])) for j in range(most)) / 1e3

        def results() -> list[DraftTokens]:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            return [DraftTokens([0] * row.num_drafts, [0.9] * row.num_drafts) for row in rows]

        return results


def load_verifier(num_seqs: int, max_model_len: int, slowdown: float) -> LoadedVerifier:
    """Takes a moment."""
    torch.set_num_threads(1)
    model = dummy_model(_MODEL, torch.float32)
    kv_cache = KVCache(_MODEL, 2 * num_seqs * (-(-max_model_len // 16) + 1), torch.float32, "cpu")
    runner = NoModel(model, kv_cache, RoundLimits(num_seqs, K, _MAX_NUM_BATCHED_TOKENS, max_model_len), num_in_flight=_NUM_ROUNDS)
    bounds = VerifierLimits(VOCAB_SIZE, max_model_len, num_seqs, K, _MAX_NUM_BATCHED_TOKENS)
    description = ServiceDescription(
        model_id="none", instance_id="draft-path", vocab_size=VOCAB_SIZE, max_model_len=max_model_len, max_num_draft_tokens=K, max_num_seqs=num_seqs,
        block_size=16, num_blocks=kv_cache.num_blocks, max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
    )  # fmt: skip
    return LoadedVerifier(Verifier(_Executor(runner, kv_cache, num_seqs, slowdown), bounds), description, None)


def make_method(num_seqs: int, max_model_len: int, slowdown: float) -> DraftModel:
    """The draft model."""
    torch.set_num_threads(1)
    num_blocks = 2 * num_seqs * (-(-max_model_len // 16) + 1)
    model = dummy_model(_MODEL, torch.float32)
    return DraftModel(
        model, _Forward(slowdown), num_blocks=num_blocks, max_num_drafts=K, max_num_seqs=num_seqs, max_model_len=max_model_len, model_id="none"
    )  # fmt: skip


async def serve_verifier(address: str, num_seqs: int, max_model_len: int, slowdown: float) -> None:
    """Until SIGTERM."""
    server = VerifierServer([address], lambda: load_verifier(num_seqs, max_model_len, slowdown), "draft-path", _NUM_ROUNDS)
    stop = asyncio.create_task(wait_for_stop_signal())
    await server.start()
    await server.load()
    calm_garbage_collector()
    await stop
    await server.stop()


async def serve_drafter(address: str, num_seqs: int, max_model_len: int, slowdown: float) -> None:
    """Until SIGTERM."""
    config = DrafterConfig(listen=(address,), max_num_seqs=num_seqs, prefill_chunk=_PREFILL_CHUNK)
    server = DrafterServer(config, lambda _: make_method(num_seqs, max_model_len, slowdown), cost_budget_s=3.0 * slowdown)
    stop = asyncio.create_task(wait_for_stop_signal())
    await server.start()
    await server.wait_ready()
    calm_garbage_collector()
    await stop
    await server.stop()


if __name__ == "__main__":
    serve = {"verifier": serve_verifier, "drafter": serve_drafter}[sys.argv[1]]
    uvloop.run(serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
