"""Drafts that compiled code draws are those that torch draws from the same logits."""

import numpy as np
import pytest
import torch

from specwire.engine.kernels.packed_linear import DigitLinear
from specwire.engine.sampling.draft import sample_draft_among
from specwire.engine.sampling.philox import Stream, noise_words

pytestmark = pytest.mark.skipif(not DigitLinear.is_fast(), reason="this CPU has no tiled passes")

KEYS = [7, 2**63 + 12345, 2**64 - 1, 0]


def _draw(logits: torch.Tensor, ids: np.ndarray, temperature: float, index: int, choice: int, key: int) -> tuple[int, float]:
    from specwire.engine.cpu.draft_choice import CHOICE_SCRATCH, draw
    from specwire.engine.cpu.draft_noise import NoisePlan

    plan = NoisePlan.make(ids)
    padded = torch.full((-(-len(ids) // 16) * 16,), 99.0)  # what no id has must not count
    padded[: len(ids)] = logits
    scratch = torch.empty(CHOICE_SCRATCH + len(padded))
    signed = int(np.uint64(key).astype(np.int64))
    token, prob = draw(
        padded.data_ptr(), len(ids), plan.ids.ctypes.data, np.float32(temperature), index, choice, signed, len(plan.blocks), plan.blocks.ctypes.data,
        plan.starts.ctypes.data, plan.columns.ctypes.data, scratch.data_ptr(),
    )  # fmt: skip
    return int(token), float(prob)


def _ids(kind: str) -> np.ndarray:
    if kind == "all":
        return np.arange(1000)
    chosen = np.random.default_rng(3).permutation(5000)[:437]
    return np.sort(chosen) if kind == "some" else chosen


@pytest.mark.parametrize("kind", ["all", "some", "unsorted"])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0, 3.0])
def test_draws_are_those_of_torch(kind: str, temperature: float) -> None:
    ids, generator = _ids(kind), torch.Generator().manual_seed(5)
    seen = set()
    for number in range(60):
        logits = torch.randn(len(ids), generator=generator) * (1, 4)[number % 2]
        key, index, choice = KEYS[number % 4], 11 + 1000 * number, number % 3
        expected = sample_draft_among(
            torch.from_numpy(ids)[None], logits[None], temperatures=[temperature], keys=[key], indices=[index], choices=[choice]
        )
        token, prob = _draw(logits, ids, temperature, index, choice, key)
        assert token == int(expected.token_ids), f"{kind}, T {temperature}, number {number}"
        assert prob == pytest.approx(float(expected.probs), rel=1e-4)
        seen.add(token)
    assert len(seen) > 30, "noise or logits must move the choice"


def test_words_are_those_of_torch() -> None:
    from specwire.engine.cpu.draft_choice import philox_16

    out = torch.empty(4, 16, dtype=torch.int64)
    for key, index, choice in ((7, 12, 0), (2**64 - 3, 2**31 + 5, 2)):
        signed = int(np.uint64(key).astype(np.int64))
        blocks = torch.arange(100, 116)
        philox_16(blocks.data_ptr(), index, choice, signed, out.data_ptr())
        expected = noise_words(*(torch.tensor([value]) for value in (signed, index, choice)), Stream.TARGET, 4 * 116)
        assert torch.equal(out.t().flatten(), expected[0, 400:])


def test_ties_go_to_the_lowest_id() -> None:
    ids = np.array([30, 4, 17, 9])
    assert _draw(torch.tensor([1.0, 1.0, 0.0, 1.0]), ids, 0.0, 1, 0, 1)[0] == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_numbers_give_a_token_that_is_worth_nothing(value: float, temperature: float) -> None:
    ids = _ids("unsorted")
    assert _draw(torch.full((len(ids),), value), ids, temperature, 1, 0, 1) == (int(ids[0]), 0.0)
