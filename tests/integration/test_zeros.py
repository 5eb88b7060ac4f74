"""Explicit zeros stay zeros from the SDK to the verifier's slot; seeds decide sampled text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specwire.messages import VerifyOpen, VerifyRound
from specwire.sampling_params import SamplingParams
from tests.engine.tiny_models import save_tiny_model
from verifier_svc.launched import LaunchedRound
from verifier_svc.verifier import Verifier

from .reference import OneTokenLoop
from .tiny import drafter_config, tiny_stack, verifier_config

_PROMPT = [72, 105, 32, 116, 104]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zeros") / "tiny"
    save_tiny_model(path)
    return path


@contextmanager
def seen_by(verifier: Verifier) -> Iterator[list[tuple[VerifyOpen, SamplingParams]]]:
    """Every Open that arrives, and the parameters with which its slot samples."""
    seen = []
    launch = verifier.launch

    def record(request: VerifyRound) -> LaunchedRound:
        launched = launch(request)
        for message in request.opens:
            sampling = verifier._slots[message.slot].sampling
            assert sampling is not None
            seen.append((message, sampling.params))
        return launched

    verifier.launch = record  # type: ignore[method-assign]
    yield seen
    verifier.launch = launch  # type: ignore[method-assign]


async def test_zeros_arrive_as_zeros(socket_dir: Path, folder: Path) -> None:
    others = SamplingParams(
        temperature=0.9, top_p=0.5, top_k=7, seed=5, logprobs=3, min_tokens=2, max_draft_tokens=3, presence_penalty=1.0, min_p=0.1
    )
    zeros: dict[str, Any] = {
        "temperature": 0,
        "top_k": 0,
        "seed": 0,
        "logprobs": 0,
        "min_tokens": 0,
        "max_draft_tokens": 0,
        "presence_penalty": 0.0,
        "min_p": 0.0,
    }
    async with tiny_stack(socket_dir, verifier_config(folder), drafter_config(folder)) as stack:
        with seen_by(stack.verifier) as seen:
            zero = await stack.client.generate(_PROMPT, others, max_tokens=8, **zeros)
            other = await stack.client.generate(_PROMPT, others, max_tokens=8)
            unset = await stack.client.generate(_PROMPT, max_tokens=8)
    (zero_open, zero_params), (other_open, other_params), (_, unset_params) = seen
    for name, value in zeros.items():
        assert getattr(zero_params, name) == value, name
        assert getattr(zero_params, name) is not None, name
        assert getattr(other_params, name) == getattr(others, name), name
    assert (zero_open.noise_key, other_open.noise_key) == (0, 5)
    assert (unset_params.seed, unset_params.logprobs, unset_params.max_draft_tokens) == (None, None, None)
    # What they mean: log-probabilities of the emitted tokens and of no others; no drafts at all.
    assert [entry.top for entry in zero.choices[0].logprobs or ()] == [[]] * len(zero.token_ids)
    assert zero.spec.num_draft_tokens == 0
    assert [len(entry.top) for entry in other.choices[0].logprobs or ()] == [3] * len(other.token_ids)
    assert other.spec.num_draft_tokens > 0
    assert unset.choices[0].logprobs is None
    assert unset.spec.num_draft_tokens > 0
    expected = OneTokenLoop(folder, 64, num_threads=1).generate(_PROMPT, SamplingParams(max_tokens=8))
    assert zero.token_ids == unset.token_ids == expected.token_ids


async def test_seeds(socket_dir: Path, folder: Path) -> None:
    async with tiny_stack(socket_dir, verifier_config(folder), drafter_config(folder)) as stack:
        with seen_by(stack.verifier) as seen:
            texts = [
                (await stack.client.generate(_PROMPT, temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)).token_ids
                for seed in (0, 0, 1, 2**64 - 1, None, None)
            ]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[1:]}) == 5
    keys = [message.noise_key for message, _ in seen]
    assert keys[:4] == [0, 0, 1, 2**64 - 1]
    assert len(set(keys)) == 5
