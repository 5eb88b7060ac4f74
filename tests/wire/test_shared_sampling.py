"""Parameters of a request's choices, which may name the whole vocabulary: packed, checked and kept once."""

import dataclasses
import math

import pytest

from specwire.engine.sampling.slot import SlotSampling
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftOpen, DraftRound, VerifyOpen, VerifyRound
from specwire.sampling_params import SamplingParams
from specwire.wire import draft, verify

VOCAB = 1000
BIASED = SamplingParams(n=3, max_tokens=8, logit_bias={token_id: 0.5 if token_id % 2 else -1.0 for token_id in reversed(range(VOCAB))})
PLAIN = SamplingParams(max_tokens=8)


def test_choices_of_one_request_arrive_with_one_object() -> None:
    params = [BIASED, BIASED, PLAIN, BIASED]
    opens = [VerifyOpen(slot, 1, [1, 2], 2, each, 7, slot) for slot, each in enumerate(params)]
    arrived = verify.unpack_round(verify.pack_round(VerifyRound(1, 0, 1, closes=[], opens=opens, rows=[]))).opens
    assert [each.sampling for each in arrived] == [dataclasses.replace(each, n=one.sampling.n) for each, one in zip(params, arrived, strict=True)]
    assert arrived[0].sampling is arrived[1].sampling
    assert arrived[3].sampling is not arrived[0].sampling
    draft_opens = [DraftOpen(slot, 1, [1, 2], 2, each, 7, slot) for slot, each in enumerate(params)]
    drafted = draft.unpack_round(draft.pack_round(DraftRound(1, 0, 1, closes=[], opens=draft_opens, commits=[], features=[], rows=[]))).opens
    assert [each.sampling for each in drafted] == [each.sampling for each in arrived]
    assert drafted[0].sampling is drafted[1].sampling


def _slot(params: SamplingParams, like: SlotSampling | None = None, vocab_size: int = VOCAB, eos: tuple[int, ...] = (3,)) -> SlotSampling:
    return SlotSampling(params, key=1, vocab_size=vocab_size, token_ids=[1, 2], num_prompt_tokens=2, eos_token_ids=eos, like=like)


def test_sequences_of_one_request_share_their_lists() -> None:
    first = _slot(BIASED)
    assert first.bias_ids is not None
    assert first.bias_ids.tolist() == list(range(VOCAB))
    assert first.bias.tolist() == [0.5 if token_id % 2 else -1.0 for token_id in range(VOCAB)]
    assert _slot(BIASED, like=first).bias_ids is first.bias_ids
    for other in (_slot(dataclasses.replace(BIASED), first), _slot(BIASED, first, VOCAB + 1), _slot(BIASED, first, eos=(4,))):
        assert other.bias_ids is not first.bias_ids
    with pytest.raises(InvalidArgumentError, match="logit_bias names token id 999"):
        _slot(BIASED, first, VOCAB - 1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -100.1, 101, True, "1", None, 10**400])
def test_one_wrong_bias_among_many_is_named(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"logit_bias\[500\]"):
        SamplingParams(logit_bias={**BIASED.logit_bias, 500: wrong})  # type: ignore[dict-item]


@pytest.mark.parametrize("wrong", [-1, 2**31, True, 1.0, "1"])
def test_one_wrong_id_among_many_is_named(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match="a token id in stop_token_ids"):
        SamplingParams(stop_token_ids=(*range(500), wrong, *range(500)))  # type: ignore[arg-type]
