"""What the trainer needs of a head, and how one is made."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from specwire.train.batches import Batch
from specwire.train.data import Sequences
from specwire.train.modules import Drafted, Pairs
from specwire.train.noise import Noise
from specwire.train.recipe import Recipe
from specwire.train.target import Target


@runtime_checkable
class Head(Protocol):
    """A trainable head; also a `torch.nn.Module`."""

    @property
    def bias_head(self) -> torch.Tensor | None:
        """[draft_vocab_size, rank], see `specwire.train.loss.vocabulary_loss`."""
        ...

    def start(self, batch: Batch) -> None:
        """Takes over what the target has; the batch shows how large its hidden states are."""
        ...

    def pairs(self, batch: Batch, generator: torch.Generator | None = None) -> Pairs:
        """Drafts to be trained on."""
        ...

    def drafts(self, batch: Batch, noise: Noise | None = None) -> Drafted:
        """Drafts as they are made when serving; without noise the most likely tokens."""
        ...


def make_head(recipe: Recipe, target: Target, num_features: int, draft_ids: torch.Tensor | None) -> torch.nn.Module:
    """A head of the recipe's method on the target's device, with random weights."""
    torch.manual_seed(recipe.seed)
    if recipe.method == "eagle3":
        from specwire.train.eagle3 import Eagle3Head

        return Eagle3Head(recipe, target, num_features, draft_ids).to(target.device)
    from specwire.train.dspark import DSparkHead

    return DSparkHead(recipe, target, num_features, draft_ids, mask_token_id(target)).to(target.device)


def mask_token_id(target: Target) -> int:
    """EOS: nothing is ever drafted behind it, so that its embedding is free to stand for a token to be drafted."""
    return target.config.eos_token_ids[0] if target.config.eos_token_ids else 0


def feature_layers(recipe: Recipe, num_layers: int) -> tuple[int, ...]:
    """The recipe's, or what loaders take where a checkpoint names none."""
    return recipe.feature_layers or tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 1)}))


def choose_draft_ids(sequences: Sequences, size: int, vocab_size: int) -> np.ndarray | None:
    """The ids that are most frequent in answers of the training sequences, ascending; None if size is 0 or the whole vocabulary."""
    if not 0 < size < vocab_size:
        return None
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in np.flatnonzero(~sequences.is_held_out):
        answer = sequences.tokens[sequences.starts[row] + sequences.prompt_lens[row] : sequences.starts[row + 1]]
        counts += np.bincount(answer, minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size])
