"""The threads that compute the pieces of a job, and the job's memory."""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from specwire.engine.cpu.job import Word

_LINE = 64
"""Bytes of a cache line."""
_SEMAPHORE_BYTES = 64
"""No less than a `sem_t`."""


class Team:
    """A job's words and the threads that work on it: the caller of `run` and num_threads - 1 helpers, which end with this object.

    Not thread-safe: one thread owns it.

    Args:
        num_threads: with the caller of `run`.
        enter: what a thread does (`work.make_loop`).
    """

    def __init__(self, num_threads: int, enter: Callable[[int, int, int], None]) -> None:
        self._enter = enter
        self.num_threads = num_threads
        memory = torch.zeros(8 * Word.COUNT + 2 * _LINE + _SEMAPHORE_BYTES, dtype=torch.uint8)
        self._semaphore = memory.data_ptr() + -memory.data_ptr() % _LINE
        self._job = self._semaphore + _SEMAPHORE_BYTES
        start = self._job - memory.data_ptr()
        self.words: np.ndarray = memory[start : start + 8 * Word.COUNT].view(torch.int64).numpy()
        self.words[Word.NUM_HELPERS] = num_threads - 1
        failed = ctypes.CDLL(None, use_errno=True).sem_init(ctypes.c_void_p(self._semaphore), 0, 0)
        assert not failed, f"sem_init: error {ctypes.get_errno()}"
        helpers = [
            threading.Thread(target=_help, args=(enter, memory, self._job, self._semaphore, thread), name=f"forward-{thread}", daemon=True)
            for thread in range(1, num_threads)
        ]
        for helper in helpers:
            helper.start()
        weakref.finalize(self, _stop, self.words, self._semaphore, helpers)

    def run(self) -> None:
        """Runs the job that the words describe."""
        self._enter(self._job, self._semaphore, 0)


def _help(enter: Callable[[int, int, int], None], memory: torch.Tensor, job: int, semaphore: int, thread: int) -> None:
    """A helper's thread; it holds the memory that it reads."""
    enter(job, semaphore, thread)
    del memory


def _stop(words: np.ndarray, semaphore: int, helpers: Sequence[threading.Thread]) -> None:
    """Waits for the helpers, too: one that comes back from compiled code while the interpreter ends would end the process with an abort."""
    words[Word.STOP] = 1
    for _ in helpers:
        ctypes.CDLL(None).sem_post(ctypes.c_void_p(semaphore))
    for helper in helpers:
        if helper is not threading.current_thread():  # where the garbage of another team was collected
            helper.join()
