"""A tiny random model, and the text that a target with its weights emits."""

from collections.abc import Sequence

import torch

from specwire.engine.batch import Segment
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.runner import ModelRunner
from specwire.engine.sampling.segments import SegmentRows, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import DraftOpen

VOCAB_SIZE = 61


def tiny_model(seed: int = 0, **overrides: object) -> Decoder:
    """Random float32 weights, large enough that its distributions are far from uniform."""
    shape = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return dummy_model(ModelConfig.from_dict(shape | overrides), torch.float32, seed=seed, std=0.25)


def target_logits(model: Decoder, token_ids: Sequence[int]) -> torch.Tensor:
    """[n, vocab_size] of every position, in one pass."""
    num_blocks = -(-len(token_ids) // 16)
    runner = ModelRunner(model, KVCache(model.config, num_blocks, model.dtype))
    batch = runner.batch([Segment(list(token_ids), 0, range(num_blocks))])
    return runner.logits(runner.forward(batch), range(len(token_ids)))


def target_texts(model: Decoder, requests: Sequence[DraftOpen], num_tokens: int) -> list[list[int]]:
    """Prompt and the num_tokens tokens that the target emits after it for each request, one a step, without any drafts.

    With the sampling contract these are its tokens whatever is drafted: a draft is accepted iff it is the text's token.
    """
    num_blocks = -(-max(len(request.token_ids) + num_tokens for request in requests) // 16)
    runner = ModelRunner(model, KVCache(model.config, num_blocks * len(requests), model.dtype))
    tables = [range(row * num_blocks, (row + 1) * num_blocks) for row in range(len(requests))]
    slots = [
        SlotSampling(
            request.sampling,
            key=request.noise_key,
            choice=request.choice,
            vocab_size=model.config.vocab_size,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        for request in requests
    ]
    texts = [list(request.token_ids) for request in requests]
    num_computed = [0] * len(requests)
    for _ in range(num_tokens):
        batch = runner.batch([Segment(text[start:], start, table) for text, start, table in zip(texts, num_computed, tables, strict=True)])
        logits = runner.logits(runner.forward(batch), [end - 1 for end in batch.row_starts[1:]])
        num_computed = [len(text) for text in texts]
        results = sample_segments(logits, [SegmentRows(slot, len(text)) for slot, text in zip(slots, texts, strict=True)])
        for slot, text, result in zip(slots, texts, results, strict=True):
            slot.append(result.token_ids)
            text.extend(result.token_ids)
    return texts
