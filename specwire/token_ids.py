"""Token ids that callers send, checked against the vocabulary."""

from collections.abc import Sequence

from specwire.errors import InvalidArgumentError


def check_token_ids(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise InvalidArgumentError for the first id that is not in [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        position, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise InvalidArgumentError(f"{name}[{position}] is {token_id}, but the model's ids are 0 to {vocab_size - 1}; use the served tokenizer")
