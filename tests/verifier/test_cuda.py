"""The same engine and verifier on a CUDA device, eagerly and in graphs: equal logits, equal rounds."""

from pathlib import Path

import pytest
import torch

from specwire.engine.batch import Segment
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model, load_model
from specwire.engine.runner import ModelRunner
from specwire.messages import FeaturePull, FeatureRange, RowStatus
from specwire.sampling_params import SamplingParams
from tests.engine.features.sources import eagle3_source, eagle_source
from tests.engine.tiny_models import FAMILIES, save_tiny_model

from .harness import PROMPT, Rounds, ahead, decode, ids, make_verifier, open_message, prefill, serve, tiny_config
from .test_features import true_features

pytestmark = pytest.mark.gpu

PROMPTS = [[3, 4, 5, 6, 7] * 9, [11, 12, 13], list(range(14, 60))]
PARAMS = [
    SamplingParams(max_tokens=None, logprobs=2),
    SamplingParams(max_tokens=None, temperature=0.7, top_p=0.95),
    SamplingParams(max_tokens=None, temperature=1.0, top_k=20, presence_penalty=0.5, repetition_penalty=1.1),
]


def _logits(model: Decoder) -> torch.Tensor:
    """float32 [R, vocab] of chunks and decode rows that share a batch."""
    runner = ModelRunner(model, KVCache(model.config, 16, model.dtype, model.device))
    first = runner.batch([Segment(list(range(5, 45)), 0, range(3)), Segment([7, 8, 9], 0, [3])])
    runner.forward(first)
    second = runner.batch([Segment([1, 2, 3], 40, range(3)), Segment(list(range(20)), 3, [3, 4]), Segment([9], 0, [5])])
    return runner.logits(runner.forward(second), range(second.num_tokens)).cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_cpu_ones(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    on_cpu, on_device = (_logits(load_model(tmp_path, torch.float32, device)) for device in ("cpu", "cuda"))
    assert on_device.dtype is torch.float32
    torch.testing.assert_close(on_device, on_cpu, atol=2e-3, rtol=1e-3)


def test_bfloat16_logits_are_near() -> None:
    config = tiny_config(vocab_size=300, hidden_size=256, num_layers=4, num_heads=8, head_dim=32, intermediate_size=512)
    exact = _logits(dummy_model(config, torch.float32, "cpu", std=0.05))
    near = _logits(dummy_model(config, torch.bfloat16, "cuda", std=0.05))
    assert near.dtype is torch.float32
    assert (near - exact).norm() / exact.norm() < 2e-2


def _texts(device: str, executor: str) -> list[list[int]]:
    """12 ragged rounds of three sequences with right, wrong and no drafts; what each emitted."""
    rounds = Rounds(make_verifier(dummy_model(tiny_config(head_dim=64), torch.float32, device, std=0.4), executor=executor))
    texts = [list(prompt) for prompt in PROMPTS]
    for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        result = rounds.open(slot, prompt, params)
        texts[slot] += result.token_ids
    for number in range(12):
        drafts = [[number % 60] * (number % 4), [], texts[2][-3:]]
        rows = rounds.launch([decode(slot, texts[slot], drafts[slot]) for slot in range(3)]).rows
        for slot, row in enumerate(rows):
            texts[slot] += row.token_ids
    return texts


@pytest.mark.parametrize("executor", ["model", "rounds"])
def test_rounds_equal_the_cpu_ones(executor: str) -> None:
    assert _texts("cuda", executor) == _texts("cpu", "model")


def test_rounds_in_flight_equal_the_cpu_ones() -> None:
    texts = []
    for device, executor in (("cuda", "rounds"), ("cpu", "model")):
        rounds = Rounds(make_verifier(dummy_model(tiny_config(head_dim=64), torch.float32, device, std=0.4), executor=executor))
        opens = [open_message(slot, prompt, params) for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
        launched = [rounds.start([prefill(slot, 60) for slot in range(3)], opens=opens)]
        rows = []
        for number in range(1, 20):
            launched.append(rounds.start([ahead(slot, len(prompt) + number, rounds.round) for slot, prompt in enumerate(PROMPTS)]))
            rows.append(rounds.finish(launched.pop(0)).rows)
        rows.append(rounds.finish(launched.pop()).rows)
        texts.append([[row.token_ids[0] for row in column] for column in zip(*rows, strict=True)])
        assert executor == "model" or rounds.verifier.num_waits == 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("executor", ["model", "rounds"])
def test_features_equal_the_cpu_ones(executor: str) -> None:
    """Of chunks, single tokens, and rows with drafts that are rejected; read by generation, as drafters do."""
    on_cpu, model = (dummy_model(tiny_config(head_dim=64), torch.float32, device, std=0.4) for device in ("cpu", "cuda"))
    sources = [eagle3_source(2, 32), eagle_source(32)]
    rounds = Rounds(make_verifier(model, executor=executor, features=sources))
    books, text = rounds.verifier.features, list(PROMPTS[0])
    assert books is not None
    assert books.waits
    result = rounds.launch([prefill(0, 30)], opens=[open_message(0, text)])
    [handle] = result.features
    text += rounds.launch([prefill(0, 30)]).rows[0].token_ids
    for drafts in ([], [9, 9, 9], [], [1]):
        text += rounds.launch([decode(0, text, drafts)]).rows[0].token_ids
    for source in sources:
        pulled = books.read(FeaturePull(source.hash, [FeatureRange(handle.generation, 0, len(text) - 1)]), 1 << 20)
        assert pulled.statuses == [RowStatus.OK]
        found = torch.frombuffer(bytearray(pulled.data), dtype=source.dtype).view(-1, source.width)
        torch.testing.assert_close(found, true_features(on_cpu, text, source)[: len(text) - 1], atol=5e-3, rtol=1e-2)


async def test_the_two_threads_of_a_served_verifier(socket_dir: Path) -> None:
    """One launches what the other waits for: a prompt and a token at a time, always two rounds in flight."""
    on_cpu, model = (dummy_model(tiny_config(head_dim=64), torch.float32, device, std=0.4) for device in ("cpu", "cuda"))
    truth = ids(on_cpu, PROMPT, 30)
    async with serve(make_verifier(model, executor="rounds"), socket_dir) as served:
        rounds, stream = Rounds(served.verifier), served.stream()
        await stream.start()
        await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
        answers = []
        for number in range(1, 30):
            await stream.send(rounds.build([ahead(0, len(PROMPT) + number, rounds.round)]))
            answers.append(await stream.receive())
        answers.append(await stream.receive())
        assert [answer.rows[0].token_ids for answer in answers if answer] == [[token_id] for token_id in truth]
        assert served.verifier.num_waits == 0
        timings = [answer.timing for answer in answers if answer]
        assert all(timing.received_ns <= timing.started_ns <= timing.finished_ns for timing in timings)
