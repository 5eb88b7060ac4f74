"""The ratio test with a draft head and its private noise, through all services: what is sampled has the target's distribution, also where sequences
are resumed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specwire.sampling_params import SamplingParams
from tests.heads import checkpoints
from tests.heads.target import Target, make_target

from .test_ratio import fail_some_rounds
from .tiny import drafter_config, tiny_stack, verifier_config

K = 3
DRAFTED = list(range(3, 33, 3))
"""All that the head can draft."""
ALLOWED = [3, 9, 12, 200]
"""All that is sampled: drafts of others are never accepted, and one is never drafted."""
PROMPT = [72, 105] * 5
NUM_SEEDS, CHOICES, NUM_TOKENS = 12, 16, 26
RATIO = {"rejection_sample_method": "probabilistic"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


def deviations(target: Target, answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """[len(ALLOWED), 2]: how much more often each token came than the target's probabilities say, in standard deviations, where it is less likely
    than on average and where it is likelier. Each token is judged by what stands before it, so that a fault at any place counts."""
    with torch.no_grad():
        logits = target.model(torch.tensor([[*PROMPT, *answer] for answer in answers])).logits[:, len(PROMPT) - 1 : -1]
    probs = logits[..., ALLOWED].double().softmax(-1).flatten(0, 1)  # [answers x tokens, allowed]
    came = (torch.tensor(answers).flatten()[:, None] == torch.tensor(ALLOWED)).double()
    assert came.sum(1).min() == 1, "a token that can't be sampled"
    is_likely = probs > probs.mean(0)
    found = []
    for where in (~is_likely, is_likely):
        excess = ((came - probs) * where).sum(0)
        found.append(excess / (probs * (1 - probs) * where).sum(0).sqrt())
    return torch.stack(found, 1)


@pytest.mark.parametrize("is_resumed", [False, True], ids=["undisturbed", "resumed"])
@pytest.mark.parametrize("name", ["eagle3_speculators", pytest.param("dspark_speculators", marks=pytest.mark.slow)])
async def test_sampled_tokens_have_the_targets_distribution(
    socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target, name: str, is_resumed: bool
) -> None:
    """Resumed: some rounds fail, drafts and all, and blocks suffice for a part of the sequences, so that others are preempted and opened anew."""
    monkeypatch.setattr(checkpoints, "SUBSET", DRAFTED)
    head = checkpoints.WRITERS[name](tmp_path / name).folder
    spec: dict[str, Any] = {"method": name.partition("_")[0], "model": str(head), "num_speculative_tokens": K} | RATIO
    verifier = verifier_config(target.folder, speculation=spec, max_num_seqs=64, num_kv_blocks=40 if is_resumed else 256)
    drafter = drafter_config(target.folder, speculation=spec, target_model=str(target.folder), max_num_seqs=64)
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, n=CHOICES, ignore_eos=True, allowed_token_ids=ALLOWED)
    async with tiny_stack(socket_dir, verifier, drafter, speculation=spec) as stack:
        if is_resumed:
            fail_some_rounds(stack.verifier)
        results = [
            choice
            async for _, result in stack.client.generate_batch([PROMPT] * NUM_SEEDS, [params.replace(seed=seed) for seed in range(NUM_SEEDS)])
            for choice in result.choices
        ]
        assert (stack.coordinator.engine.counters.num_verifier_losses > 0) is is_resumed
    assert len(results) == NUM_SEEDS * CHOICES
    assert (sum(choice.spec.num_preemptions for choice in results) > 10) is is_resumed
    accepted, drafted = (sum(getattr(choice.spec, field) for choice in results) for field in ("num_accepted_tokens", "num_draft_tokens"))
    assert 50 < accepted < drafted - 50, f"{accepted} of {drafted}: one side of the test was hardly tried"
    found = deviations(target, [choice.token_ids for choice in results])
    assert found.abs().max() < 4.5, found


def test_other_chances_are_seen(target: Target) -> None:
    """The check itself: answers at a temperature of 2, or with the likeliest token in one place of three, are not taken for the target's."""
    torch.manual_seed(0)
    for temperature, share in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.33)):
        texts = torch.tensor([PROMPT] * (NUM_SEEDS * CHOICES))
        for _ in range(16):
            with torch.no_grad():
                logits = target.model(texts).logits[:, -1, ALLOWED]
            drawn = (logits / temperature).softmax(-1).multinomial(1)[:, 0]
            drawn = torch.where(torch.rand(len(drawn)) < share, logits.argmax(-1), drawn)
            texts = torch.cat([texts, torch.tensor(ALLOWED)[drawn][:, None]], 1)
        is_seen = bool(deviations(target, texts[:, len(PROMPT) :].tolist()).abs().max() > 4.5)
        assert is_seen is (temperature != 1.0 or share > 0), (temperature, share)
