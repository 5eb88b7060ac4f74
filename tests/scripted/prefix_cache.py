"""Which blocks of prompts a scripted verifier has computed, by tenant."""

from collections.abc import Iterator

from specwire.messages import VerifyOpen


class PrefixCache:
    """Keeps all that was computed.

    Args:
        block_size: tokens of a block; only whole ones are kept.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kept: set[tuple[bytes, int]] = set()

    def num_cached(self, opened: VerifyOpen) -> int:
        """Tokens that need not be computed; never the last one."""
        num_cached = 0
        for length, state in self._blocks(opened.token_ids[:-1]):
            if (opened.tenant_cache_key, state) not in self._kept:
                break
            num_cached = length
        return num_cached

    def add(self, opened: VerifyOpen) -> None:
        """All tokens of the sequence have been computed."""
        self._kept.update((opened.tenant_cache_key, state) for _, state in self._blocks(opened.token_ids))

    def _blocks(self, token_ids: list[int]) -> Iterator[tuple[int, int]]:
        """Of each whole block: tokens up to its end, and what stands for them."""
        state = 0
        for length, token in enumerate(token_ids, start=1):
            state = hash((state, token))
            if length % self._block_size == 0:
                yield length, state
