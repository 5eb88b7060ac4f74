"""Synthetic acceptance: measured per sequence, only where configured."""

import math

import pytest
import torch

from specwire.messages import RowStatus, SlotRef
from specwire.speculative_config import SpeculativeConfig
from tests.verifier.harness import Rounds, decode, open_message, prefill, tiny_model

RATES = (0.8, 0.5, 0.1)
PER_SEQUENCE = {0: (), 1: (0.9, 0.9, 0.9), 2: (0.3, 0.0, 0.0), 3: (1.0, 1.0, 1.0), 4: (0.0, 0.0, 0.0)}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_model(num_layers=1)


def test_each_sequence_accepts_by_its_own_rates(model, make):
    rounds = Rounds(make(model, num_blocks=300, max_model_len=500, max_num_draft_tokens=3, synthetic_rates=RATES))
    num_rounds, accepted = 0, {slot: [0, 0, 0] for slot in PER_SEQUENCE}
    for life in range(1, 5):
        opens = [open_message(slot, [slot, life], epoch=life, noise_key=100 * life + slot, synthetic_acceptance_rates=rates)
                 for slot, rates in PER_SEQUENCE.items()]  # fmt: skip
        closes = [SlotRef(slot, life - 1) for slot in PER_SEQUENCE]
        first = rounds.launch([prefill(slot, 9, epoch=life) for slot in PER_SEQUENCE], opens=opens, closes=closes)
        tokens = {slot: [slot, life, *row.token_ids] for slot, row in zip(PER_SEQUENCE, first.rows, strict=True)}
        for _ in range(120):
            rows = rounds.launch([decode(slot, tokens[slot], [1, 2, 3], epoch=life) for slot in PER_SEQUENCE]).rows
            num_rounds += 1
            for slot, row in zip(PER_SEQUENCE, rows, strict=True):
                assert row.status == RowStatus.OK
                assert row.token_ids[:-1] == [1, 2, 3][: row.num_accepted]
                tokens[slot] += row.token_ids
                for position in range(row.num_accepted):
                    accepted[slot][position] += 1
    for slot, rates in PER_SEQUENCE.items():
        for count, rate in zip(accepted[slot], rates or RATES, strict=True):
            assert abs(count / num_rounds - rate) <= 4 * math.sqrt(rate * (1 - rate) / num_rounds), f"slot {slot}: {accepted[slot]} of {num_rounds}"


@pytest.mark.parametrize(
    ("rates", "match"),
    [
        ((0.5,), "synthetic_acceptance_rates has 1 entries, but num_speculative_tokens is 3; give one a position"),
        ((0.5, 0.4, 0.3, 0.2), "has 4 entries"),
        ((0.5, 0.6, 0.1), "rise from 0.5 to 0.6"),
        ((1.5, 0.6, 0.1), "[0] is 1.5, but must be"),
        ((float("nan"), 0.6, 0.1), "[0] is nan"),
    ],
)
def test_wrong_rates_end_their_request(model, rates, match, make):
    rounds = Rounds(make(model, max_num_draft_tokens=3, synthetic_rates=RATES))
    row = rounds.open(0, [1, 2], synthetic_acceptance_rates=rates)
    assert row.status == RowStatus.BAD
    assert match in row.error


def test_strict_verifiers_ignore_no_rates_silently(model, make):
    rounds = Rounds(make(model, max_num_draft_tokens=3))
    row = rounds.open(0, [1, 2], synthetic_acceptance_rates=RATES)
    assert row.status == RowStatus.BAD
    assert "rejection_sample_method is strict" in row.error


def test_a_length_of_the_configuration_becomes_rates():
    config = SpeculativeConfig(rejection_sample_method="synthetic", num_speculative_tokens=3, synthetic_acceptance_length=2.5)
    assert config.acceptance_rates() == (1.0, 0.5, 0.0)
