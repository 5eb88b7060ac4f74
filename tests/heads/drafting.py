"""A drafter over a head, whose features are handed to it, and the reference beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from drafter_svc.device_forward import DeviceForward
from drafter_svc.draft_head import DraftHead, FeatureSpan
from drafter_svc.load_head import head_drafter
from drafter_svc.method import Ask, Drafts
from specwire.engine.graphs.backends import Backend
from specwire.engine.heads.load import LoadedHead, load_head
from specwire.engine.kv_cache import KVCache
from specwire.messages import DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams
from tests.heads.checkpoints import Checkpoint
from tests.heads.reference import Noise, Reference
from tests.heads.target import Target, true_features

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class GivenFeatures:
    """True features by sequence: of the first `ready` positions, if that is set, and none at all while `lost`."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    is_lost: bool = False
    num_read: int = 0

    def num_ready(self, seq_id: int, num_tokens: int) -> int:
        return min(self.ready.get(seq_id, num_tokens), num_tokens - 1)

    def read(self, spans: Sequence[FeatureSpan]) -> list[torch.Tensor | None]:
        if self.is_lost:
            return [None] * len(spans)
        for span in spans:
            assert span.first + span.num_positions <= self.ready.get(span.seq_id, 1 << 30), f"{span} is not ready"
        self.num_read += sum(span.num_positions for span in spans)
        return [self.rows[span.seq_id][span.first : span.first + span.num_positions] for span in spans]

    def close(self, seq_id: int) -> None:
        pass


@dataclass
class Bench:
    """One head as a drafter, and as the reference; texts with their features."""

    loaded: LoadedHead
    reference: Reference
    target: Target
    checkpoint: Checkpoint
    features: GivenFeatures
    method: DraftHead
    texts: dict[int, list[int]] = field(default_factory=dict)
    requests: dict[int, DraftOpen] = field(default_factory=dict)
    num_known: dict[int, int] = field(default_factory=dict)
    sharpness: float = 1.0

    def begin(self, seq_id: int, text: list[int], num_tokens: int, temperature: float = 0.0, key: int = 11, tenant: bytes = b"") -> None:
        """Opens a sequence with the first tokens of a text."""
        self.texts[seq_id] = text
        self.features.rows[seq_id] = true_features(self.target, self.checkpoint, text)
        sampling = SamplingParams(temperature=temperature)
        self.requests[seq_id] = DraftOpen(seq_id, 1, text[:num_tokens], num_tokens, sampling, key + seq_id, seq_id % 3, tenant)
        self.method.open(seq_id, self.requests[seq_id])
        self.num_known[seq_id] = num_tokens

    def commit(self, seq_id: int, num_tokens: int) -> None:
        known = self.num_known[seq_id]
        self.method.append(seq_id, self.texts[seq_id][known : known + num_tokens])
        self.num_known[seq_id] += num_tokens

    def catch_up(self, budget: int = 64) -> int:
        total = 0
        while computed := self.method.catch_up(budget):
            total += computed
        return total

    def check(self, asks: Sequence[Ask]) -> list[Drafts]:
        """Drafts of several sequences at once; asserts that each is the reference's."""
        answers = self.method.propose(asks)
        for ask, drafts in zip(asks, answers, strict=True):
            known, request = self.num_known[ask.seq_id], self.requests[ask.seq_id]
            assert drafts.status is RowStatus.OK, f"{ask}: {drafts}"
            noise = Noise((request.sampling.temperature or 0.0) / self.sharpness, request.noise_key, request.choice)
            expected, scores = self.reference.drafts(
                self.texts[ask.seq_id][:known], self.features.rows[ask.seq_id][: known - 1], ask.num_drafts, noise
            )
            assert drafts.token_ids == expected, f"sequence {ask.seq_id} at {known} tokens"
            assert torch.allclose(torch.tensor(drafts.scores), torch.tensor(scores), atol=2e-4), f"{drafts.scores}, expected {scores}"
        self.method.check_integrity()
        return answers


def make_bench(
    target: Target,
    checkpoint: Checkpoint,
    *,
    max_num_drafts: int = 4,
    num_blocks: int = 96,
    backend: Callable[..., Backend] | None = None,
    sharpness: float = 1.0,
) -> Bench:
    """
    Args:
        backend: draft on the device with these kernels.
        sharpness: of drafts that are not drafted on the device.
    """
    method = checkpoint.folder.name.partition("_")[0]
    loaded = load_head(checkpoint.folder, method, target=target.folder, dtype="float32", device=DEVICE if backend else "cpu")
    features = GivenFeatures()
    if backend is None:
        drafter = head_drafter(loaded, features, num_blocks=num_blocks, max_num_drafts=max_num_drafts, max_num_seqs=16, sharpness=sharpness)
    else:
        drafter = _on_device(loaded, features, num_blocks, max_num_drafts, backend)
    return Bench(loaded, Reference(checkpoint, target.tensors), target, checkpoint, features, drafter, sharpness=sharpness)


def _on_device(loaded: LoadedHead, features: GivenFeatures, num_blocks: int, max_num_drafts: int, backend: Callable[..., Backend]) -> DraftHead:
    shape, source = loaded.config.layers, loaded.source
    cache = KVCache(shape, num_blocks, loaded.dtype, loaded.device)
    for layer in cache.layers:
        layer.fill_(float("nan"))  # what was not computed must not be read
    forward = DeviceForward(
        loaded.head, shape, source.width, cache, max_num_seqs=8, max_num_drafts=max_num_drafts, max_model_len=loaded.max_model_len, max_chunk=24,
        backend=backend(shape, loaded.device, loaded.dtype, cache.block_size),
    )  # fmt: skip
    forward.capture()
    limits = head_drafter(loaded, features, num_blocks=num_blocks, max_num_drafts=max_num_drafts, max_num_seqs=8).description
    return DraftHead(forward, features, source.width, limits)
