"""Memory of one process that others of the same user and host read: pages of features, and a generation word for each place.

It is an anonymous file, reached through /proc: it goes with the last process that has it, and no limit of /dev/shm holds for it. A name is the
process, its descriptor and a random token that the file repeats, so that a number that means something else (another container) is noticed.

A place holds the features of one sequence. Its word is the sequence's generation, random and never 0, while it does, and 0 while it does not; it
changes before the sequence's blocks are anybody else's. Readers look at it before and after they copy: if it was theirs both times, so is the copy.
"""

import json
import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specwire.errors import UnavailableError

_MAGIC = b"specwire-features-1\n"
_HEADER_BYTES = 16384
_ALIGNMENT = 4096


class PoolSet(NamedTuple):
    """The features of one head: their hash, the bytes of a token's, and, if their pages are not in the pool but on a GPU, what opens them."""

    hash: str
    bytes_per_token: int
    device_memory: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What is where.

    Args:
        token: random text.
        num_places: sequences at a time.
        num_blocks: that sequences may own; the pages have one more.
        block_size: tokens of a block.
        sets: in their order.
    """

    token: str
    num_places: int
    num_blocks: int
    block_size: int
    sets: tuple[PoolSet, ...]

    @classmethod
    def make(cls, num_places: int, num_blocks: int, block_size: int, sets: Sequence[PoolSet]) -> "PoolLayout":
        """With a new token."""
        return cls(secrets.token_hex(16), num_places, num_blocks, block_size, tuple(sets))

    def pages_bytes(self, one: PoolSet) -> int:
        """Bytes of a head's pages in the pool."""
        return 0 if one.device_memory else (self.num_blocks + 1) * self.block_size * one.bytes_per_token

    def offset(self, set_hash: str) -> int:
        """Where a head's pages begin."""
        offset = _aligned(_HEADER_BYTES + 8 * self.num_places)
        for one in self.sets:
            if one.hash == set_hash:
                return offset
            offset = _aligned(offset + self.pages_bytes(one))
        raise KeyError(set_hash)

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        last = self.sets[-1]
        return self.offset(last.hash) + self.pages_bytes(last)


class FeaturePool:
    """A pool, ours or another process's.

    Attributes:
        name: what another process opens it by.
        layout: what is where.
        words: uint64 [num_places]; not writable where the pool is another process's.
    """

    def __init__(self, descriptor: int, process: int, layout: PoolLayout, *, is_writable: bool) -> None:
        self.name = f"{process}/{descriptor}/{layout.token}"
        self.layout = layout
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._map = mmap.mmap(descriptor, layout.num_bytes, prot=protection)
        self.words: np.ndarray = np.frombuffer(self._map, dtype=np.uint64, count=layout.num_places, offset=_HEADER_BYTES)

    @classmethod
    def create(cls, layout: PoolLayout) -> "FeaturePool":
        """A new pool, as long as this process lives; it takes memory as it is written.

        Raises:
            UnavailableError: the system gives none (a sandbox, a limit).
        """
        header = _MAGIC + json.dumps([layout.token, layout.num_places, layout.num_blocks, layout.block_size, layout.sets]).encode()
        assert len(header) < _HEADER_BYTES, f"{len(layout.sets)} sets take {len(header)} bytes"
        descriptor = -1
        try:
            descriptor = os.memfd_create("specwire-features", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, layout.num_bytes)
            os.pwrite(descriptor, header, 0)
            return cls(descriptor, os.getpid(), layout, is_writable=True)
        except (OSError, OverflowError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise UnavailableError(f"the system gives no shared memory of {layout.num_bytes} bytes ({error})") from error

    @classmethod
    def open(cls, name: str) -> "FeaturePool":
        """Another process's pool.

        Raises:
            UnavailableError: it can't be reached from here, or is another one by now.
        """
        process, _, rest = name.partition("/")
        number, _, token = rest.partition("/")
        if not (process.isdecimal() and number.isdecimal()):
            raise UnavailableError(f"{name!r} names no shared memory; read features over gRPC")
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise UnavailableError(
                f"the shared memory of process {process} can't be opened here ({error.strerror}); read features over gRPC"
            ) from error
        try:
            layout = _read_layout(descriptor)
            if layout is None or layout.token != token or os.fstat(descriptor).st_size < layout.num_bytes:
                raise UnavailableError(f"process {process} here is not the verifier that shares its features; read them over gRPC")
            pool = cls(descriptor, int(process), layout, is_writable=False)
        finally:
            os.close(descriptor)
        pool.name = name
        return pool

    def pages(self, set_hash: str) -> memoryview:
        """The bytes of a head's pages, [num_blocks + 1, block_size, bytes_per_token], where the pool has them. Raises KeyError."""
        offset = self.layout.offset(set_hash)
        [one] = [one for one in self.layout.sets if one.hash == set_hash]
        return memoryview(self._map)[offset : offset + self.layout.pages_bytes(one)]

    def rows(self, set_hash: str) -> np.ndarray:
        """The same as uint8 [(num_blocks + 1) * block_size, bytes_per_token]: a row a token."""
        [one] = [one for one in self.layout.sets if one.hash == set_hash]
        return np.frombuffer(self.pages(set_hash), dtype=np.uint8).reshape(-1, one.bytes_per_token)


def token_slots(spans: Iterable[tuple[Sequence[int], int, int]], block_size: int) -> np.ndarray:
    """Rows in pages that are taken as one row a token, int64 [positions of all spans].

    Args:
        spans: blocks of a sequence, first position and number of positions of each.
    """
    slots: list[int] = []
    for block_ids, first, count in spans:
        block, offset = divmod(first, block_size)
        # Whole runs: a step reads a few positions of each of many sequences, where numpy would take longer to start.
        while count > 0:
            num_here = min(count, block_size - offset)
            slot = block_ids[block] * block_size + offset
            slots += range(slot, slot + num_here)
            block, offset, count = block + 1, 0, count - num_here
    return np.array(slots, dtype=np.int64)


def _read_layout(descriptor: int) -> PoolLayout | None:
    try:
        header = os.pread(descriptor, _HEADER_BYTES, 0)
        if not header.startswith(_MAGIC):
            return None
        token, num_places, num_blocks, block_size, sets = json.loads(header[len(_MAGIC) :].rstrip(b"\0"))
        return PoolLayout(token, num_places, num_blocks, block_size, tuple(PoolSet(*one) for one in sets))
    except (OSError, ValueError, TypeError):
        return None


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
