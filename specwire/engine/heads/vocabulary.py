"""Embedding and output layer of a head: its own, or the target's; and which of the target's ids it can draft."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.tensors import HeadReader, HeadTensors
from specwire.engine.kernels.linear import LogitsHead
from specwire.engine.models.weights import make_head_linear
from specwire.errors import InvalidArgumentError

FREQUENT_IDS = "frequent_ids.npy"
"""File of a head's folder, int32 [n]: the ids that are worth drafting where an output layer is most of a draft's time, on a CPU."""
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is in front of and behind a head's layers."""

    embedding: torch.Tensor  # [target's vocab_size, hidden_size]
    head: LogitsHead  # hidden_size -> num_drafted
    target_ids: torch.Tensor | None  # [num_drafted] int64, the target's id of each column of the head; None = the same ids
    size: int
    """The target's vocab_size."""
    num_drafted: int
    """draft_vocab_size, or the frequent ids alone."""


def read_vocabulary(reader: HeadReader, config: HeadConfig, target: Path | None) -> Vocabulary:
    """From the head's folder, and from the target's where the head shares its tensors.

    Args:
        target: the target's folder; None = the head's own tensors must suffice.

    Raises:
        InvalidArgumentError: a tensor is in neither, has another shape, or ids are none of the target's.
    """
    shared = _Shared(reader, config, target)
    size, hidden = config.layers.vocab_size, config.layers.hidden_size
    embedding = shared.read(_EMBEDDING, size, hidden, None)
    target_ids = _target_ids(reader.tensors, config)
    if config.draft_vocab_size == size or target_ids is not None:
        output = shared.read(_OUTPUT, config.draft_vocab_size, hidden, target_ids)
    else:
        raise InvalidArgumentError(
            f"{config.name} drafts {config.draft_vocab_size} ids of a vocabulary of {size}, but has no tensor d2t to say which; save the head again"
        )
    if target_ids is None and reader.is_narrowed and (frequent := _frequent_ids(reader.tensors.folder, size)) is not None:
        target_ids, output = frequent, output[frequent]
    if target_ids is not None:
        target_ids = target_ids.to(reader.device)
    return Vocabulary(embedding, LogitsHead(output, make_head_linear(reader.output_weights, output)), target_ids, size, len(output))


class _Shared:
    def __init__(self, reader: HeadReader, config: HeadConfig, target: Path | None) -> None:
        self._reader = reader
        self._config = config
        self._target = target

    def read(self, name: str, rows: int, columns: int, target_ids: torch.Tensor | None) -> torch.Tensor:
        """The head's own tensor, else the target's rows of these ids; None = all."""
        reader = self._reader
        if name in reader.tensors:
            return reader.single(name, rows, columns)
        if name == _OUTPUT and self._config.layers.tie_word_embeddings and _EMBEDDING in reader.tensors:
            whole = reader.single(_EMBEDDING, self._config.layers.vocab_size, columns)
            return whole if target_ids is None else whole[target_ids]
        if self._target is None:
            raise InvalidArgumentError(
                f"{self._config.name} has no tensor {name}: it shares the target's; name the target as target_model in the drafter's configuration"
            )
        theirs = HeadTensors(self._target)
        stored = name if name in theirs else _EMBEDDING  # a tied output layer is not stored
        tensor = theirs.read(stored, (self._config.layers.vocab_size, columns))
        return reader.keep(tensor) if target_ids is None else tensor[target_ids].to(reader.device, reader.dtype)


def _frequent_ids(folder: Path, size: int) -> torch.Tensor | None:
    path = folder / FREQUENT_IDS
    if not path.is_file():
        return None
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidArgumentError(f"{path} can't be read ({error}); remove it, or write it again with specwire.train.narrow") from error
    if ids.ndim != 1 or ids.dtype != np.int32 or not len(ids) or len(np.unique(ids)) < len(ids) or ids.min() < 0 or ids.max() >= size:
        raise InvalidArgumentError(
            f"{path} holds {ids.dtype} {list(ids.shape)}, but must hold different int32 ids of 0 to {size - 1}; remove it, or write it again with "
            "specwire.train.narrow"
        )
    return torch.from_numpy(ids.astype(np.int64))


def _target_ids(tensors: HeadTensors, config: HeadConfig) -> torch.Tensor | None:
    """d2t holds offsets: column i of the head is the target's id i + d2t[i]."""
    if "d2t" not in tensors:
        return None
    count, size = config.draft_vocab_size, config.layers.vocab_size
    ids = torch.arange(count) + tensors.read("d2t", (count,)).long()
    if len(ids.unique()) < count or int(ids.min()) < 0 or int(ids.max()) >= size:
        raise InvalidArgumentError(f"{config.name}: d2t does not give {count} different ids of 0 to {size - 1}; save the head again")
    return None if count == size and bool((ids == torch.arange(size)).all()) else ids
