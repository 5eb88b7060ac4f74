"""Two vocabularies side by side: which tokens of a draft model with another tokenizer stand for tokens of the target.

Equal strings are equal tokens, but for the sign that a tokenizer has for a space in front. Byte tokens, special ones and case stay as they are.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers
import torch

from specwire.errors import InvalidArgumentError
from specwire.json_files import read_json_object

logger = logging.getLogger(__name__)

SPACE_PREFIXES = ("\u0120", "\u2581")
"""Of byte-level and of SentencePiece tokenizers: taken where a tokenizer does not show its own."""
_FEW = 100


class Encodes(Protocol):
    """The part of `tokenizers.Tokenizer` that shows its sign for a space."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> tokenizers.Encoding: ...


def space_prefixes(tokenizer: Encodes) -> tuple[str, ...]:
    """What a tokenizer writes for a space in front of a token: what " a" becomes, less its "a"; else both usual ones."""
    try:
        tokens = tokenizer.encode(" a", add_special_tokens=False).tokens
    except Exception as error:  # the library raises bare Exception
        logger.warning("the sign for a space of a tokenizer is not known (%s): %s are taken for it", error, " and ".join(SPACE_PREFIXES))
        return SPACE_PREFIXES
    first = tokens[0] if tokens else ""
    if len(first) < 2 or not first.endswith("a") or first[0] in " \t":
        return SPACE_PREFIXES
    return (first[:-1],)


class VocabMapping:
    """The tokens that two tokenizers have in common. Of several that become equal the one with the lowest id counts.

    Args:
        draft, target: the tokenizers.
        draft_size, target_size: of the models' vocabularies; ids from there on do not exist.
        unknown_id: the draft model's id for tokens of the target that it does not have.

    Raises:
        InvalidArgumentError: no token in common, or unknown_id is none of the draft model's.
    """

    def __init__(self, draft: tokenizers.Tokenizer, target: tokenizers.Tokenizer, draft_size: int, target_size: int, unknown_id: int) -> None:
        if not 0 <= unknown_id < draft_size:
            raise InvalidArgumentError(f"the draft model's unknown token is {unknown_id}, but its vocabulary ends at {draft_size - 1}")
        mine, theirs = _normalised(draft, draft_size), _normalised(target, target_size)
        pairs = sorted((draft_id, theirs[text]) for text, draft_id in mine.items() if text in theirs)
        if not pairs:
            raise InvalidArgumentError("the tokenizers of draft model and target have no token in common; use another draft model")
        self.size = target_size
        self.columns = torch.tensor([draft_id for draft_id, _ in pairs])
        """[m] int64, the draft model's ids that are drafted."""
        self.target_ids = torch.tensor([target_id for _, target_id in pairs])
        """[m] int64, what they are to the target."""
        self._draft_ids = [unknown_id] * target_size
        for draft_id, target_id in pairs:
            self._draft_ids[target_id] = draft_id
        logger.info(
            "%d tokens in common: %.0f%% of the draft model's %d and %.0f%% of the target's %d",
            len(pairs), 100 * len(pairs) / draft_size, draft_size, 100 * len(pairs) / target_size, target_size,
        )  # fmt: skip
        if len(pairs) < _FEW:
            logger.warning("draft model and target have only %d tokens in common: few drafts will be accepted", len(pairs))

    def to(self, device: torch.device) -> "VocabMapping":
        """This one, with its tensors on a device."""
        self.columns, self.target_ids = self.columns.to(device), self.target_ids.to(device)
        return self

    def draft_ids(self, target_ids: Sequence[int]) -> list[int]:
        """What the draft model reads for tokens of the target."""
        known = self._draft_ids
        return [known[target_id] for target_id in target_ids]


def read_mapping(draft: Path, target: Path, draft_size: int, target_size: int, eos_token_ids: Sequence[int]) -> VocabMapping:
    """From the models' folders.

    Args:
        eos_token_ids: of the draft model, which stand for unknown tokens where it has no token for them.

    Raises:
        InvalidArgumentError: a folder has no tokenizer.json, or the draft model has neither an unknown token nor EOS.
    """
    mine = _read(draft)
    unknown = _unknown_id(mine, draft)
    if unknown is None:
        if not eos_token_ids:
            raise InvalidArgumentError(f"{draft} has neither an unknown token nor an EOS token to stand for tokens that it lacks; use another one")
        unknown = eos_token_ids[0]
        logger.warning("%s has no unknown token: its EOS token %d stands for tokens that it lacks", draft, unknown)
    return VocabMapping(mine, _read(target), draft_size, target_size, unknown)


def _read(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidArgumentError(f"{folder} has no tokenizer.json, which use_heterogeneous_vocab needs; save the model's tokenizer there")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InvalidArgumentError(f"{path} can't be read as a tokenizer: {error}") from error


def _unknown_id(tokenizer: tokenizers.Tokenizer, folder: Path) -> int | None:
    path = folder / "tokenizer_config.json"
    named = read_json_object(path).get("unk_token") if path.is_file() else None
    text = named.get("content") if isinstance(named, dict) else named
    if text is None:
        text = json.loads(tokenizer.to_str())["model"].get("unk_token")
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return None if token_id is None else int(token_id)


def _normalised(tokenizer: tokenizers.Tokenizer, size: int) -> dict[str, int]:
    """Lowest id below size by string, with a space for the tokenizer's own sign."""
    prefixes = space_prefixes(tokenizer)
    found: dict[str, int] = {}
    for text, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token_id < size:
            prefix = next((prefix for prefix in prefixes if text.startswith(prefix)), "")
            found.setdefault(" " + text[len(prefix) :] if prefix else text, token_id)
    return found
