"""Which KV blocks each sequence owns, and which finished blocks others may reuse (prefix cache). Pure Python, no tensors.

A sequence's KV has three lengths: `num_final_tokens` (committed tokens whose KV is computed: only these enter the prefix cache),
`num_computed_tokens` (also drafts; may be rolled back) and the capacity of its blocks (also positions that are only reserved).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_ROOT_DIGEST_PREFIX = b"specwire-prefix-1"


@dataclass(slots=True)
class _Owned:
    """KV of one sequence."""

    block_table: list[int]
    num_final_tokens: int
    num_computed_tokens: int
    num_registered_blocks: int  # leading blocks whose digest is part of the chain
    digest: bytes  # of the last registered block
    tail: array = field(default_factory=lambda: array("i"))  # final tokens behind the last registered block


class BlockManager:
    """Owner of `num_blocks` blocks. Sequences are keyed by an int that the caller chooses (its slot number, say). Not thread-safe.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens per block.
        enable_prefix_cache: whether closed sequences' full blocks stay findable until they are evicted.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, enable_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_prefix_cache = enable_prefix_cache
        self._sequences: dict[int, _Owned] = {}
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, so that tables tend to be contiguous
        self._evictable: OrderedDict[int, None] = OrderedDict()  # unreferenced cached blocks, least recently used first
        self._block_of_digest: dict[bytes, int] = {}
        self._digest_of_block: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a reservation can take now: unused ones and evictable cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._sequences)

    def open(self, seq_id: int, token_ids: Sequence[int], cache_key: bytes = b"") -> int:
        """Starts owning a sequence and takes the cached blocks of its prefix. Returns num_computed_tokens, the tokens found there.

        At least the last of `token_ids` is left to compute. Reserve nothing else: see `reserve`.

        Args:
            seq_id: not open now.
            token_ids: all tokens known so far.
            cache_key: only sequences of an equal key share blocks (a tenant, a LoRA variant).
        """
        assert seq_id not in self._sequences, f"sequence {seq_id} is open already"
        self._sequences[seq_id] = _Owned([], 0, 0, 0, hashlib.sha256(_ROOT_DIGEST_PREFIX + cache_key).digest())
        return self.look_up(seq_id, token_ids)

    def look_up(self, seq_id: int, token_ids: Sequence[int]) -> int:
        """Takes blocks of its prefix that were cached since `open`; only of a sequence that has no other blocks. Returns as `open` does."""
        owned = self._sequences[seq_id]
        table, size = owned.block_table, self.block_size
        assert len(table) * size == owned.num_computed_tokens, f"sequence {seq_id}: {len(table)} blocks, {owned.num_computed_tokens} tokens"
        if self._enable_prefix_cache:
            for start in range(len(table) * size, (len(token_ids) - 1) // size * size, size):
                digest = self._chain(owned.digest, array("i", token_ids[start : start + size]))
                block = self._block_of_digest.get(digest)
                if block is None:
                    break
                self._reference(block)
                owned.digest = digest
                table.append(block)
        owned.num_registered_blocks = len(table)
        owned.num_final_tokens = owned.num_computed_tokens = len(table) * size
        return owned.num_computed_tokens

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Gives the sequence blocks for its first `num_tokens` positions (lookahead included).

        Returns False, and changes nothing, where too few blocks are free: this sequence is out of blocks, the others are not.
        """
        table = self._sequences[seq_id].block_table
        num_missing = -(-num_tokens // self.block_size) - len(table)
        if num_missing > 0 and num_missing > self.num_free_blocks:
            return False
        for _ in range(num_missing):
            block = self._take_free_block()
            self._ref_counts[block] = 1
            table.append(block)
        return True

    def num_missing_blocks(self, seq_id: int, num_tokens: int) -> int:
        """Blocks that `reserve` would take."""
        return max(0, -(-num_tokens // self.block_size) - len(self._sequences[seq_id].block_table))

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's blocks in order; not to be changed by the caller."""
        return self._sequences[seq_id].block_table

    def num_computed_tokens(self, seq_id: int) -> int:
        """Leading positions whose KV is in the cache, drafts included."""
        return self._sequences[seq_id].num_computed_tokens

    def num_final_tokens(self, seq_id: int) -> int:
        """Leading positions whose KV is in the cache and belongs to committed tokens."""
        return self._sequences[seq_id].num_final_tokens

    def set_computed(self, seq_id: int, num_computed_tokens: int) -> None:
        """After a forward pass: KV of so many leading positions is in the cache. Lowering is a rollback; blocks stay until close."""
        owned = self._sequences[seq_id]
        capacity = len(owned.block_table) * self.block_size
        assert owned.num_final_tokens <= num_computed_tokens <= capacity, (
            f"sequence {seq_id}: {num_computed_tokens} computed tokens, but {owned.num_final_tokens} are final and {capacity} fit"
        )
        owned.num_computed_tokens = num_computed_tokens

    def finalize(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """The next tokens after `num_final_tokens` are these for good, and their KV is in the cache; full blocks become findable."""
        owned = self._sequences[seq_id]
        num_final_tokens = owned.num_final_tokens = owned.num_final_tokens + len(token_ids)
        if num_final_tokens > owned.num_computed_tokens:
            owned.num_computed_tokens = num_final_tokens
        size, table = self.block_size, owned.block_table
        assert num_final_tokens <= len(table) * size, f"sequence {seq_id}: {num_final_tokens} final tokens, but {len(table) * size} fit"
        if not self._enable_prefix_cache:
            return
        tail = owned.tail
        tail.extend(token_ids)
        while len(tail) >= size:
            owned.digest = self._chain(owned.digest, tail[:size])
            del tail[:size]
            block = table[owned.num_registered_blocks]
            owned.num_registered_blocks += 1
            # An equal block that another sequence computed first stays the findable one.
            if owned.digest not in self._block_of_digest:
                self._block_of_digest[owned.digest] = block
                self._digest_of_block[block] = owned.digest

    def close(self, seq_id: int, *, forget: bool = False) -> None:
        """Ends ownership. `forget` also drops the sequence's unshared blocks from the prefix cache (its numbers went bad)."""
        table = self._sequences.pop(seq_id).block_table
        # Last block first: a chain is evicted from its end, since a block without its predecessors can't be found.
        for block in reversed(table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if forget:
                self._unregister(block)
            if block in self._digest_of_block:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def cached_blocks(self, seq_id: int) -> list[tuple[int, bytes]]:
        """The sequence's blocks that the prefix cache has, with their digests: what `forget` takes."""
        return [(block, self._digest_of_block[block]) for block in self._sequences[seq_id].block_table if block in self._digest_of_block]

    def forget(self, cached_blocks: Sequence[tuple[int, bytes]]) -> None:
        """Drops blocks from the prefix cache that a closed sequence left there, as far as they still are what it left and nobody holds them."""
        for block, digest in cached_blocks:
            if self._digest_of_block.get(block) == digest and not self._ref_counts[block]:
                self._unregister(block)
                del self._evictable[block]
                self._free.append(block)

    def check_integrity(self) -> None:
        """Asserts that every block is in exactly one place, and that counts and cache agree. For tests."""
        references = [0] * self.num_blocks
        for seq_id, owned in self._sequences.items():
            capacity = len(owned.block_table) * self.block_size
            assert owned.num_final_tokens <= owned.num_computed_tokens <= capacity, f"sequence {seq_id}: {owned}"
            assert len(set(owned.block_table)) == len(owned.block_table), f"sequence {seq_id} holds a block twice: {owned.block_table}"
            for block in owned.block_table:
                references[block] += 1
        assert references == self._ref_counts, f"counted {references}, kept {self._ref_counts}"
        unreferenced = {block for block, count in enumerate(references) if count == 0}
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), f"a block is free twice: {sorted(self._free)}"
        assert not free & evictable, f"free and evictable: {free & evictable}"
        assert free | evictable == unreferenced, f"free {free}, evictable {evictable}, unreferenced {unreferenced}"
        assert {block: digest for digest, block in self._block_of_digest.items()} == self._digest_of_block, "digests and blocks disagree"
        assert evictable <= set(self._digest_of_block), f"evictable blocks without a digest: {evictable - set(self._digest_of_block)}"
        assert not free & set(self._digest_of_block), f"free blocks with a digest: {free & set(self._digest_of_block)}"

    @staticmethod
    def _chain(digest: bytes, token_ids: array) -> bytes:
        return hashlib.sha256(digest + token_ids.tobytes()).digest()

    def _reference(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._evictable[block]
        self._ref_counts[block] += 1

    def _take_free_block(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._evictable.popitem(last=False)
        self._unregister(block)
        return block

    def _unregister(self, block: int) -> None:
        digest = self._digest_of_block.pop(block, None)
        if digest is not None:
            del self._block_of_digest[digest]
