"""Drafters over both ways to run a draft model."""

import pytest

from drafter_svc.draft_model import DraftModel
from drafter_svc.forward import DraftForward, EagerForward
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.runner import ModelRunner
from tests.drafter.draft_models import MODEL, Make


def eager_forward(model: Decoder, cache: KVCache, max_num_drafts: int) -> DraftForward:
    return EagerForward(ModelRunner(model, cache))


def device_forward(model: Decoder, cache: KVCache, max_num_drafts: int) -> DraftForward:
    return DraftRunner(model, cache, max_num_seqs=12, max_num_drafts=max_num_drafts, max_model_len=512, max_chunk=48)


@pytest.fixture(params=[eager_forward, device_forward])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a drafter over either way to run the model."""

    def make(model: Decoder = MODEL, num_blocks: int = 256, max_num_drafts: int = 8, **options: object) -> DraftModel:
        cache = KVCache(model.config, num_blocks, model.dtype)
        for layer in cache.layers:
            layer.fill_(float("nan"))  # what was not computed must not be read
        forward = request.param(model, cache, max_num_drafts)
        return DraftModel(model, forward, num_blocks=num_blocks, max_num_drafts=max_num_drafts, **options)  # type: ignore[arg-type]

    return make
