"""A tiny model behind the real verifier: in process, and served on a socket; a client for its stream; a reference decoder."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import pytest
import torch

from specwire.engine.batch import Segment
from specwire.engine.features.pages import make_pool
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.heads.source import FeatureSource
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig, RopeConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.runner import ModelRunner
from specwire.engine.sampling.segments import SegmentRows, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import Hello, ServiceDescription, SlotRef, TokenizerSpec, VerifyOpen, VerifyResult, VerifyRound, VerifyRow, VerifyRowResult
from specwire.rpc import DEFAULT_MAX_MESSAGE_BYTES, open_channel
from specwire.sampling_params import SamplingParams
from specwire.v1 import verifier_pb2_grpc
from specwire.wire.verify import pack_round, unpack_result
from verifier_svc.forward import ModelExecutor
from verifier_svc.launched import LaunchedRound
from verifier_svc.loading import LoadedVerifier
from verifier_svc.round_executor import RoundExecutor
from verifier_svc.server import VerifierServer
from verifier_svc.slots import VerifierLimits
from verifier_svc.verifier import Verifier

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
EOS = 2
PROMPT = [5, 17, 33, 8, 21, 40, 9]


def tiny_config(vocab_size: int = 61, **changes: object) -> ModelConfig:
    """A Llama of 2 layers and width 32."""
    values: dict = {
        "model_type": "llama",
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope": RopeConfig(), "eos_token_ids": (EOS,),
    }  # fmt: skip
    return ModelConfig(**(values | changes))


def tiny_model(seed: int = 0, **changes: object) -> Decoder:
    """Random float32 weights, large enough for distributions with clear favourites."""
    return dummy_model(tiny_config(**changes), torch.float32, seed=seed, std=0.4)


def poison(model: Decoder, token_id: int) -> None:
    """Makes every sequence that holds this token NaN from there on."""
    model._embedding[token_id] = float("nan")


def make_verifier(
    model: Decoder | None = None,
    *,
    executor: str = "model",
    num_blocks: int = 64,
    num_in_flight: int = 2,
    enable_prefix_cache: bool = True,
    features: Sequence[FeatureSource] = (),
    shares_features: bool = False,
    **limits: object,
) -> Verifier:
    """A verifier on a tiny model.

    Args:
        executor: model (runner), or rounds: the round runner, on a CPU with the kernels' twins.
        num_in_flight: rounds that may be launched and not read, if executor is rounds.
        features: of heads; in shared memory if shares_features.
        limits: fields of VerifierLimits.
    """
    model = model or tiny_model()
    pool = make_pool(features, max_num_seqs=8, num_blocks=num_blocks) if shares_features else None
    kv_cache = KVCache(model.config, num_blocks, model.dtype, model.device, features=features, feature_pool=pool)
    values: dict = {
        "vocab_size": model.config.vocab_size, "max_model_len": 256, "max_num_seqs": 8, "max_num_draft_tokens": 8, "max_num_batched_tokens": 256,
    }  # fmt: skip
    bounds = VerifierLimits(**(values | limits))
    if executor == "model":
        return Verifier(ModelExecutor(ModelRunner(model, kv_cache)), bounds, enable_prefix_cache=enable_prefix_cache)
    sizes = RoundLimits(bounds.max_num_seqs, bounds.max_num_draft_tokens, bounds.max_num_batched_tokens, bounds.max_model_len)
    rounds = RoundRunner(model, kv_cache, sizes, num_in_flight=num_in_flight)
    rounds.capture()
    return Verifier(RoundExecutor(rounds, kv_cache, bounds.max_num_seqs), bounds, enable_prefix_cache=enable_prefix_cache)


def open_message(slot: int, token_ids: Sequence[int], sampling: SamplingParams = GREEDY, *, epoch: int = 1, **fields: object) -> VerifyOpen:
    """An Open whose tokens are all prompt unless num_prompt_tokens says otherwise."""
    values: dict = {"num_prompt_tokens": len(token_ids), "noise_key": 7, "eos_token_ids": (EOS,)}
    return VerifyOpen(slot, epoch, list(token_ids), sampling=sampling, **(values | fields))


class Rounds:
    """Numbers rounds and keeps parents, as a coordinator does; `launch` runs them on a verifier in process, `start` and `finish` in two steps."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.round = 0
        self.parents: dict[SlotRef, int] = {}

    def build(
        self, rows: Sequence[VerifyRow] = (), *, opens: Sequence[VerifyOpen] = (), closes: Sequence[SlotRef] = (), **fields: object
    ) -> VerifyRound:
        """The next round. A row whose parent_round is None gets the last round that this object put a row of its slot into."""
        self.round += 1
        filled = []
        for row in rows:
            ref = SlotRef(row.slot, row.epoch)
            filled.append(row if row.parent_round is not None else row._replace(parent_round=self.parents.get(ref, 0)))
            self.parents[ref] = self.round
        return VerifyRound(1, 0, self.round, closes=list(closes), opens=list(opens), rows=filled, **fields)  # type: ignore[arg-type]

    def launch(self, rows: Sequence[VerifyRow] = (), **fields: object) -> VerifyResult:
        return self.finish(self.start(rows, **fields))

    def start(self, rows: Sequence[VerifyRow] = (), **fields: object) -> LaunchedRound:
        launched = self.verifier.launch(self.build(rows, **fields))  # type: ignore[arg-type]
        self.verifier.check_integrity()
        return launched

    def finish(self, launched: LaunchedRound) -> VerifyResult:
        result = self.verifier.finish(launched)
        self.verifier.check_integrity()
        return result

    def open(self, slot: int, token_ids: Sequence[int], sampling: SamplingParams = GREEDY, *, epoch: int = 1, **fields: object) -> VerifyRowResult:
        """Opens a slot and prefills it in one chunk; the row's result has the first sampled token."""
        message = open_message(slot, token_ids, sampling, epoch=epoch, **fields)
        return self.launch([prefill(slot, 200, epoch=epoch)], opens=[message]).rows[0]


def prefill(slot: int, budget: int, *, epoch: int = 1, parent: int | None = None) -> VerifyRow:
    return VerifyRow(slot, epoch, parent, token_budget=budget)  # type: ignore[arg-type]


def decode(slot: int, token_ids: Sequence[int], drafts: Sequence[int] = (), *, epoch: int = 1, parent: int | None = None) -> VerifyRow:
    """A decode row of a sequence that has these tokens so far."""
    return VerifyRow(slot, epoch, parent, base_len=len(token_ids), first_token=token_ids[-1], draft_tokens=list(drafts))  # type: ignore[arg-type]


def ahead(slot: int, base_len: int, from_round: int, *, epoch: int = 1, parent: int | None = None) -> VerifyRow:
    return VerifyRow(slot, epoch, parent, base_len=base_len, from_round=from_round)  # type: ignore[arg-type]


def reference(model: Decoder, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY, *, key: int = 7, choice: int = 0) -> list:
    """One-token-a-step decoding without any state kept between tokens: (token_id, logprobs, is_near_tie) for each token."""
    tokens, out = list(prompt), []
    for _ in range(num_tokens):
        num_blocks = len(tokens) // 16 + 1
        runner = ModelRunner(model, KVCache(model.config, num_blocks, model.dtype))
        hidden = runner.forward(runner.batch([Segment(tokens, 0, range(num_blocks))]))
        slot = SlotSampling(
            sampling,
            key=key,
            choice=choice,
            vocab_size=model.config.vocab_size,
            token_ids=tokens,
            num_prompt_tokens=len(prompt),
            eos_token_ids=(EOS,),
        )
        [sampled] = sample_segments(runner.logits(hidden, [len(tokens) - 1]), [SegmentRows(slot, len(tokens))], margins=True)
        assert sampled.margins is not None
        out.append((sampled.token_ids[0], sampled.logprobs[0] if sampled.logprobs else None, sampled.margins[0].is_near_tie))
        tokens.append(sampled.token_ids[0])
    return out


def ids(model: Decoder, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY, *, key: int = 7, choice: int = 0) -> list[int]:
    """The reference's token ids alone."""
    return [token_id for token_id, _, _ in reference(model, prompt, num_tokens, sampling, key=key, choice=choice)]


class VerifyStream:
    """A client's end of one Verify stream; `send` and `receive` are independent, so that W rounds can be outstanding."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierServiceStub, hello: Hello) -> None:
        self._call = stub.Verify()
        self._hello: Hello | None = hello

    async def start(self) -> VerifyResult | None:
        """Sends hello alone; returns the welcome message."""
        await self.send(VerifyRound(1, 0, 0))
        return await self.receive()

    async def send(self, message: VerifyRound) -> None:
        """Writes a round, the first one with hello. Where the stream has ended, `receive` says why."""
        hello, self._hello = self._hello, None
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(pack_round(message if hello is None else dataclasses.replace(message, hello=hello)))

    async def receive(self) -> VerifyResult | None:
        """The next answer; None where the stream ended well, else raises AioRpcError."""
        response = await self._call.read()
        return None if response is grpc.aio.EOF else unpack_result(response)

    async def round_trip(self, message: VerifyRound) -> VerifyResult | None:
        await self.send(message)
        return await self.receive()

    async def finish(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A verifier on a Unix socket of this process."""

    verifier: Verifier
    server: VerifierServer
    address: str
    channel: grpc.aio.Channel

    @property
    def stub(self) -> verifier_pb2_grpc.VerifierServiceStub:
        return verifier_pb2_grpc.VerifierServiceStub(self.channel)

    def stream(self, coordinator_id: str = "c", incarnation: int = 1, max_outstanding_rounds: int = 2) -> VerifyStream:
        return VerifyStream(self.stub, Hello(coordinator_id, incarnation, max_outstanding_rounds))


def describe(verifier: Verifier, **changes: object) -> ServiceDescription:
    """What a tiny verifier says about itself."""
    values: dict = {
        "model_id": "tiny", "instance_id": "instance-1", "vocab_size": verifier.limits.vocab_size, "max_model_len": verifier.limits.max_model_len,
        "max_num_draft_tokens": verifier.limits.max_num_draft_tokens, "max_num_seqs": verifier.limits.max_num_seqs, "weights_hash": "tiny",
        "dtype": "float32", "numerics_version": "1.1", "device": "cpu", "block_size": 16, "num_blocks": verifier.num_blocks, "eos_token_ids": (EOS,),
        "max_num_batched_tokens": verifier.limits.max_num_batched_tokens, "max_message_bytes": DEFAULT_MAX_MESSAGE_BYTES,
    }  # fmt: skip
    return ServiceDescription(**(values | changes))


@contextlib.asynccontextmanager
async def serve(
    verifier: Verifier,
    folder: Path,
    *,
    tokenizer: TokenizerSpec | None = None,
    max_outstanding_rounds: int = 2,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    before_load: Callable[[], object] = lambda: None,
) -> AsyncIterator[Served]:
    """Serves a verifier on a Unix socket in `folder` (the `socket_dir` fixture); loaded and SERVING inside the block."""
    address = f"unix:{folder}/verifier-{id(verifier)}.sock"

    def load() -> LoadedVerifier:
        before_load()
        fingerprint = "" if tokenizer is None else tokenizer.fingerprint
        return LoadedVerifier(verifier, describe(verifier, max_message_bytes=max_message_bytes, tokenizer_fingerprint=fingerprint), tokenizer)

    server = VerifierServer([address], load, "instance-1", max_outstanding_rounds, max_message_bytes)
    await server.start()
    try:
        await server.load()
        async with open_channel(address, max_message_bytes) as channel:
            yield Served(verifier, server, address, channel)
    finally:
        await server.stop(1.0)


async def ends_with(stream: VerifyStream, code: grpc.StatusCode, match: str = "") -> grpc.aio.AioRpcError:
    """Reads a stream to its end, which must be this status."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(stream)
    assert (caught.value.code(), match in caught.value.details()) == (code, True), caught.value
    return caught.value


async def drain(stream: VerifyStream) -> None:
    """Reads a stream to its end."""
    while await stream.receive() is not None:
        pass


class LaunchGate:
    """Holds the verifier's worker at a launch until it is opened; counts launches."""

    def __init__(self, verifier: Verifier) -> None:
        self.num_launched = 0
        self._launch, self._open = verifier.launch, threading.Event()
        verifier.launch = self._hold

    def open(self) -> None:
        self._open.set()

    def _hold(self, request: VerifyRound) -> LaunchedRound:
        self.num_launched += 1
        assert self._open.wait(60)
        return self._launch(request)
