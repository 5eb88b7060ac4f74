"""What heads compute in training: each pass of EAGLE-3 and each block of DSpark against what they see when they draft."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specwire.train.batches import Batch, BatchSource
from specwire.train.dspark import DSparkHead
from specwire.train.eagle3 import Eagle3Head
from specwire.train.heads import choose_draft_ids, feature_layers, make_head
from specwire.train.recipe import RECIPES
from specwire.train.target import Target
from tests.train.conftest import small

ROWS = np.array([1, 2, 5, 9])


def started(method: str, target: Target, source: BatchSource, **changes: object) -> torch.nn.Module:
    head = make_head(small(method, **changes), target, 3, None)
    head.start(source.batch(ROWS))
    return head


def follow(batch: Batch, drafted: torch.Tensor, place: int) -> Batch:
    """The batch with row 0's tokens behind `place` replaced by what is drafted there."""
    tokens = batch.tokens.clone()
    tokens[0, place + 1 : place + 1 + drafted.shape[-1]] = drafted[0, place]
    return replace(batch, tokens=tokens)


@torch.no_grad()
def test_eagle3_training_sees_what_drafting_sees(target: Target, source: BatchSource) -> None:
    head = started("eagle3", target, source, num_layers=2)
    assert isinstance(head, Eagle3Head)
    batch = source.batch(ROWS)
    place = int(batch.prompt_lens[0])
    drafted = head.drafts(batch)
    pairs = head.pairs(follow(batch, drafted.tokens, place))
    length = batch.tokens.shape[1]
    for number in range(4):
        # Draft `number` behind `place` is made for the target position place + number.
        [index] = (pairs.rows == place + number).nonzero()[:, 0].tolist()
        assert pairs.weights[number, index] > 0
        logits = pairs.hidden[number, index] @ target.head.t()
        assert int(logits.argmax()) == int(drafted.tokens[0, place, number])
        assert torch.logit(logits.softmax(-1).max()).item() == pytest.approx(drafted.signals[0, place, number, 0].item(), abs=1e-3)
    assert pairs.rows.max() < len(ROWS) * length


@torch.no_grad()
def test_dspark_training_sees_what_drafting_sees(target: Target, source: BatchSource) -> None:
    head = started("dspark", target, source, anchor_stride=1, rerank=259)
    assert isinstance(head, DSparkHead)
    head.markov_head.markov_w2.weight.normal_(0, 0.3)
    batch = source.batch(ROWS)
    place = int(batch.prompt_lens[0])
    drafted = head.drafts(batch)
    pairs = head.pairs(follow(batch, drafted.tokens, place))
    assert pairs.previous is not None
    for number in range(4):
        [index] = (pairs.rows == place + number).nonzero()[:, 0].tolist()
        assert int(pairs.positions[number, index]) == number
        logits = pairs.hidden[number, index] @ target.head.t() + pairs.previous[index] @ head.bias_head.t()
        assert int(logits.argmax()) == int(drafted.tokens[0, place, number])


@pytest.mark.parametrize(("method", "stride"), [("eagle3", 4), ("dspark", 1), ("dspark", 2), ("dspark", 3)])
def test_each_draft_has_a_target_in_its_answer(method: str, stride: int, target: Target, source: BatchSource) -> None:
    head = started(method, target, source, anchor_stride=stride)
    batch = source.batch(ROWS)
    pairs = head.pairs(batch, torch.Generator().manual_seed(0))
    length = batch.tokens.shape[1]
    is_draft = pairs.weights > 0
    assert is_draft.any(0).all()
    for draft, index in is_draft.nonzero().tolist():
        row, place = divmod(int(pairs.rows[index]), length)
        position = int(pairs.positions[draft, index])
        anchor = place - position  # last token that is known
        assert anchor >= int(batch.prompt_lens[row])
        assert place + 1 < int(batch.lengths[row])
        assert position < 4
    # Every token of an answer behind its second is drafted, at every distance (EAGLE-3) or by blocks that lie close enough.
    expected = sum(int(n - p) - 1 for n, p in zip(batch.lengths, batch.prompt_lens, strict=True))
    assert len(pairs.rows) == expected if method == "eagle3" or stride == 1 else len(pairs.rows) > expected / 2
    if method == "eagle3":
        assert int(is_draft.sum()) == sum(max(0, int(n - p) - 1 - k) for n, p in zip(batch.lengths, batch.prompt_lens, strict=True) for k in range(4))


@pytest.mark.parametrize("method", RECIPES)
def test_padding_changes_nothing(method: str, target: Target, source: BatchSource) -> None:
    head = started(method, target, source)
    short = int(source.sequences.lengths.argmin())
    alone, among = source.batch(np.array([short])), source.batch(np.array([short, int(source.sequences.lengths.argmax())]))
    assert among.tokens.shape[1] > alone.tokens.shape[1]
    tokens, signals = head.drafts(alone)
    first, last = int(alone.prompt_lens[0]), int(alone.lengths[0])
    others = head.drafts(among)
    assert torch.equal(tokens[0, first:last], others.tokens[0, first:last])
    torch.testing.assert_close(signals[0, first:last], others.signals[0, first:last], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", RECIPES)
def test_all_weights_learn(method: str, target: Target, source: BatchSource) -> None:
    head = started(method, target, source)
    if isinstance(head, DSparkHead):
        torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    pairs = head.pairs(source.batch(ROWS), torch.Generator().manual_seed(0))
    total = pairs.hidden.square().sum() + (0 if pairs.previous is None else (pairs.previous @ head.bias_head.t()).square().sum())
    total.backward()
    assert [name for name, parameter in head.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


def test_which_layers_are_read() -> None:
    assert feature_layers(small("eagle3"), 30) == (2, 15, 27)
    assert feature_layers(small("eagle3", feature_layers=(1, 5)), 30) == (1, 5)
    assert feature_layers(small("eagle3"), 2) == (1,)


def test_the_most_frequent_ids_of_training_answers(source: BatchSource) -> None:
    sequences = source.sequences
    ids = choose_draft_ids(sequences, 5, 259)
    assert ids is not None
    assert len(ids) == 5
    assert list(ids) == sorted(set(ids.tolist()))
    answers = np.concatenate(
        [
            sequences.tokens[sequences.starts[row] + sequences.prompt_lens[row] : sequences.starts[row + 1]]
            for row in np.flatnonzero(~sequences.is_held_out)
        ]
    )
    counts = np.bincount(answers, minlength=259)
    assert counts[ids].min() >= np.delete(counts, ids).max()
    assert choose_draft_ids(sequences, 0, 259) is None
    assert choose_draft_ids(sequences, 259, 259) is None
