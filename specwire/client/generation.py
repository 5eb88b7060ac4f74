"""One generation at the client: how long it may take, how it was started, and when it is started again."""

import asyncio
import contextlib
import numbers
import random
import reprlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specwire.client.session import LiveRequest
from specwire.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError, SpecwireError, UnavailableError
from specwire.messages import ChoiceDelta
from specwire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

# Longer in sum than the second between two attempts of a channel to connect, so that the last one finds a coordinator that is back.
_FIRST_PAUSE_S = 0.5
_PAUSE_GROWTH = 4.0
_LONGEST_PAUSE_S = 8.0
_LONGEST_TIMEOUT_S = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Generation:
    """A started generation, what its results are made with, and what it gave first."""

    prompt_token_ids: list[int]
    params: SamplingParams
    live: LiveRequest
    tokenizer: "Tokenizer | None"
    first: list[ChoiceDelta]


class Deadline:
    """A number of seconds from now, or none. Raises InvalidArgumentError for what is no positive number of seconds."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None:
            is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)  # numpy's numbers do
            if not is_number or not 0 < timeout <= _LONGEST_TIMEOUT_S:
                text = f"timeout is {reprlib.repr(timeout)}, but must be a positive number of seconds, at most {_LONGEST_TIMEOUT_S}"
                raise InvalidArgumentError(f"{text}; None waits without limit")
            timeout = float(timeout)
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def remaining_s(self) -> float:
        """What is left of it."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    @property
    def remaining_ms(self) -> int | None:
        """What is left of it, at least 1; None without one."""
        return None if self._end is None else max(1, round(1000 * self.remaining_s))

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises DeadlineExceededError in its body when the deadline passes."""
        if self._end is None:
            yield
            return
        try:
            async with asyncio.timeout(self._end - time.monotonic()):
                yield
        except SpecwireError:
            raise
        except TimeoutError:
            raise DeadlineExceededError(f"the generation did not end within {self._timeout:g} s; raise timeout or lower max_tokens") from None


class Retries:
    """When a request that has given nothing is sent again: after an error that passes, a bounded number of times, after growing pauses.

    Args:
        max_retries: most further attempts of a request; 0 = none.

    Raises:
        InvalidArgumentError: max_retries is no count.
    """

    def __init__(self, max_retries: int) -> None:
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
            raise InvalidArgumentError(f"max_retries is {max_retries!r}, but must be an integer of at least 0; 0 sends every request once")
        self.max_retries = max_retries
        self._num_retries = 0

    @property
    def num_retries(self) -> int:
        """Further attempts so far, of all requests."""
        return self._num_retries

    def count(self) -> None:
        """A further attempt is made."""
        self._num_retries += 1

    def pause_s(self, error: SpecwireError, num_failures: int, deadline: Deadline, *, waits_for_room: bool) -> float | None:
        """Seconds to wait before the next attempt; None if the error does not pass, no attempt is left or the deadline comes first."""
        passes = isinstance(error, UnavailableError) or (waits_for_room and is_full(error))
        if not passes or num_failures > self.max_retries:
            return None
        pause_s = min(_FIRST_PAUSE_S * _PAUSE_GROWTH ** (num_failures - 1), _LONGEST_PAUSE_S)
        pause_s = pause_before_retry(error, pause_s)
        return pause_s if pause_s < deadline.remaining_s else None


def pause_before_retry(error: SpecwireError, own_s: float) -> float:
    """Seconds until what was refused is sent again: the caller's own at most, after those that the coordinator asks for."""
    # Clients that failed together should not come back together; none before it was asked to.
    return random.uniform(0.5, 1.0) * own_s + (error.retry_after_ms or 0) / 1000


def is_full(error: SpecwireError) -> bool:
    """Whether a refusal is about the moment and not about the request: the coordinator says when there may be room."""
    return isinstance(error, ResourceExhaustedError) and error.retry_after_ms is not None
