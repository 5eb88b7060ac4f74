"""Heads behind real services: what is drafted comes from the verifier's own hidden states, and is the reference's."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.draft_head import DraftHead
from drafter_svc.method import Ask, Drafts
from specwire.config import DrafterConfig
from specwire.messages import RowStatus
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.heads.checkpoints import Checkpoint
from tests.heads.reference import Noise, Reference
from tests.heads.target import Target, true_features
from tests.integration.reference import OneTokenLoop
from tests.integration.tiny import tiny_stack, verifier_config

PROMPTS = [[7 * i % 250 for i in range(3, 45)], [11 * i % 250 for i in range(1, 20)], [5, 9]]


class Recorder:
    """Stands between the worker and the method: what was known, and what was drafted."""

    def __init__(self, method: DraftHead) -> None:
        self.drafted: list[tuple[list[int], Drafts]] = []
        self._method = method
        self._propose = method.propose
        method.propose = self.propose  # type: ignore[method-assign]

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        known = [list(self._method._sequences[ask.seq_id].token_ids) for ask in asks]
        answers = self._propose(asks)
        self.drafted += zip(known, answers, strict=True)
        return answers


@pytest.mark.parametrize("name", ["eagle3_speculators", "eagle_plain", "mtp_mimo", "dspark_native"])
async def test_drafts_of_services_equal_the_reference(socket_dir: Path, target: Target, checkpoints: dict[str, Checkpoint], name: str) -> None:
    checkpoint = checkpoints[name]
    spec: dict[str, Any] = {"method": name.partition("_")[0], "model": str(checkpoint.folder), "num_speculative_tokens": 4}
    drafter = DrafterConfig(
        dtype="float32", num_threads=1, kv_cache_memory=4 << 20, target_model=str(target.folder), speculative_config=SpeculativeConfig.from_dict(spec)
    )
    # Chunks, and so few tokens of a round that prompts and drafts of several sequences share it.
    verifier = verifier_config(target.folder, speculation=spec, max_num_batched_tokens=24)
    async with tiny_stack(socket_dir, verifier, drafter, speculation=spec) as stack:
        assert stack.drafter is not None
        method = stack.drafter.worker.ready.result()
        assert isinstance(method, DraftHead)
        recorder = Recorder(method)
        params = [
            SamplingParams(temperature=temperature, seed=3 + i, max_tokens=24, ignore_eos=True) for i, temperature in enumerate((0.0, 0.8, 0.0))
        ]
        results = await asyncio.gather(*(stack.client.generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)))
    texts = [prompt + list(result.token_ids) for prompt, result in zip(PROMPTS, results, strict=True)]
    loop = OneTokenLoop(target.folder, 256, 1)
    for prompt, one, result in zip(PROMPTS, params, results, strict=True):
        assert list(result.token_ids) == loop.generate(prompt, one).token_ids
    drafted = [(known, drafts) for known, drafts in recorder.drafted if drafts.status is RowStatus.OK and drafts.token_ids]
    assert len(drafted) > 30, f"{len(drafted)} of {len(recorder.drafted)}"
    reference, features = Reference(checkpoint, target.tensors), [true_features(target, checkpoint, text) for text in texts]
    for known, drafts in drafted:
        [row] = [i for i, text in enumerate(texts) if text[: len(known)] == known]
        noise = Noise(params[row].temperature or 0.0, 3 + row)
        assert drafts.token_ids == reference.drafts(known, features[row][: len(known) - 1], len(drafts.token_ids), noise)[0]
