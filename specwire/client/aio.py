"""The asynchronous client."""

import asyncio
import functools
import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from specwire.client.arguments import check_prompt, make_params
from specwire.client.results import GenerationResult
from specwire.client.rpc import fetch_tokenizer
from specwire.client.session import Session
from specwire.client.stream import AsyncTokenStream, Deadline, Generation, read_result
from specwire.config import DEFAULT_PORT
from specwire.errors import FailedPreconditionError, UnavailableError, UnsupportedError
from specwire.messages import GenerateRequest, TokenizerSpec
from specwire.rpc import open_channel, wait_serving
from specwire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"


class _Connection:
    """What belongs to one event loop of one process: the channel, the session on it and the served tokenizer."""

    def __init__(self, address: str, max_message_bytes: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self._address = address
        self.channel = open_channel(address, max_message_bytes)
        self.session = Session(self.channel, address, max_message_bytes)
        self._fetching = asyncio.Lock()
        self._tokenizer: tuple[int, Tokenizer | None] | None = None
        self._closed = False

    async def tokenizer(self) -> "Tokenizer | None":
        """Fetched once for as long as the session holds: another coordinator may answer after it broke.

        Raises:
            UnavailableError: it can't be fetched, or the connection was closed meanwhile.
        """
        async with self._fetching:
            self._check_open()
            if self._tokenizer is None or self._tokenizer[0] != self.session.num_breaks:
                num_breaks = self.session.num_breaks
                try:
                    spec = await fetch_tokenizer(self.channel)
                except UnavailableError as error:
                    raise UnavailableError(f"the coordinator at {self._address} can't be reached ({error}); is it running there?") from None
                except asyncio.CancelledError:
                    # Closing a channel cancels whoever waits for its calls, as if their tasks had been cancelled.
                    self._check_open()
                    raise
                # Reading a large vocabulary takes a good part of a second.
                self._tokenizer = num_breaks, None if spec is None else await asyncio.to_thread(_load_tokenizer, spec)
            self._check_open()
            return self._tokenizer[1]

    async def close(self) -> None:
        self._closed = True
        await self.session.close()
        await self.channel.close()

    def _check_open(self) -> None:
        task = asyncio.current_task()
        if self._closed and not (task and task.cancelling()):
            raise UnavailableError(f"the connection to the coordinator at {self._address} is gone: the client was closed")


class AsyncClient:
    """A client of one coordinator; belongs to the event loop that first uses it. All its requests share one stream.

    Args:
        address: `host:port` or `unix:path`.
        max_message_mb: largest message either way in MiB; at most the coordinator's own limit.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, max_message_mb: int = 64) -> None:
        self._address = address
        self._max_message_bytes = max_message_mb << 20
        self._connection: _Connection | None = None
        self._closed = False

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> GenerationResult:
        """Generates and returns everything at the end; cancelling the task ends the generation.

        Args:
            prompt: text, or token ids.
            params: sampling parameters; the defaults of SamplingParams if left out.
            timeout: seconds for everything, waiting in the coordinator's queue included.
            request_id: a label for logs and traces.
            **sampling: single sampling parameters by name, over `params`.

        Raises:
            InvalidArgumentError: a wrong parameter or prompt; nothing was generated.
            DeadlineExceededError: the timeout passed.
            ResourceExhaustedError: the coordinator's queue is full, or the request is too large.
            UnavailableError: there is no coordinator, or it went away.
            UnsupportedError: the prompt is text, but no tokenizer is served.
        """
        params, prompt, deadline = make_params(params, sampling), check_prompt(prompt), Deadline(timeout)
        async with deadline.limit():
            return await read_result(await self._begin(prompt, params, request_id, deadline, whole=True))

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> AsyncTokenStream:
        """Generates and returns an asynchronous iterator over what comes; arguments and errors as in `generate`.

        Use it in `async with` where leaving it early must end the generation at once.
        """
        params, prompt, deadline = make_params(params, sampling), check_prompt(prompt), Deadline(timeout)
        return AsyncTokenStream(functools.partial(self._begin, prompt, params, request_id, deadline, whole=False), deadline)

    async def get_tokenizer(self) -> "Tokenizer":
        """The served tokenizer, fetched once. Raises UnsupportedError if there is none."""
        tokenizer = await self._connect().tokenizer()
        if tokenizer is None:
            raise UnsupportedError(f"the coordinator at {self._address} serves no tokenizer; send token ids instead of text")
        return tokenizer

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once the coordinator serves. Raises UnavailableError if it does not within `timeout` seconds."""
        connection = self._connect()
        try:
            async with asyncio.timeout(timeout):
                await wait_serving(connection.channel)
        except TimeoutError:
            raise UnavailableError(
                f"the coordinator at {self._address} does not serve after {timeout:g} s; is it running there? its log says what it waits for"
            ) from None

    async def close(self) -> None:
        """Ends all generations and the connection; may be called again."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.pid != os.getpid() or connection.loop is not asyncio.get_running_loop():
            logger.warning("a client of %s is closed outside of its event loop: its connection is dropped", self._address)
            return
        await connection.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _connect(self) -> _Connection:
        if self._closed:
            raise FailedPreconditionError("the client is closed; make a new one")
        if self._connection is None:
            self._connection = _Connection(self._address, self._max_message_bytes)
        if self._connection.pid != os.getpid():
            raise FailedPreconditionError("the client was used before a fork; make a new one in this process")
        if self._connection.loop is not asyncio.get_running_loop():
            raise FailedPreconditionError("the client belongs to another event loop; make one client per loop")
        return self._connection

    async def _begin(self, prompt: str | list[int], params: SamplingParams, request_id: str, deadline: Deadline, *, whole: bool) -> Generation:
        connection = self._connect()
        tokenizer = await connection.tokenizer()
        if not isinstance(prompt, str):
            prompt_token_ids = prompt
        elif tokenizer is not None:
            prompt_token_ids = tokenizer.encode(prompt)
        else:
            raise UnsupportedError(f"the prompt is text, but the coordinator at {self._address} serves no tokenizer; send token ids")
        request = GenerateRequest(prompt_token_ids, params, request_id, timeout_ms=deadline.remaining_ms)
        return Generation(prompt_token_ids, params, connection.session.start(request, whole=whole), tokenizer)


def _load_tokenizer(spec: TokenizerSpec) -> "Tokenizer":
    from specwire.tokenizer import Tokenizer  # loads libraries that a client of token ids never needs

    return Tokenizer(spec)
