"""The blocking client: the asynchronous one on an event loop of its own in a background thread."""

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from specwire.client.aio import DEFAULT_ADDRESS, AsyncClient
from specwire.client.results import GenerationResult, StreamEvent
from specwire.client.stream import AsyncTokenStream
from specwire.errors import FailedPreconditionError, UnavailableError
from specwire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

Result = TypeVar("Result")

_CLOSE_TIMEOUT_S = 5.0


class Client:
    """A client of one coordinator for programs without an event loop; threads may share it. Arguments as in AsyncClient.

    Close it, or use it in `with`; one that is forgotten closes itself when it is collected or the program ends.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, max_message_mb: int = 64) -> None:
        self._client = AsyncClient(address, max_message_mb=max_message_mb)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specwire-client", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._client, self._loop, self._thread, self._pid)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> GenerationResult:
        """Generates and returns everything at the end; arguments and errors as in AsyncClient.generate."""
        return self._call(self._client.generate(prompt, params, timeout=timeout, request_id=request_id, **sampling))

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> "TokenStream":
        """Generates and returns an iterator over what comes; arguments and errors as in AsyncClient.generate."""
        return TokenStream(self, self._client.stream(prompt, params, timeout=timeout, request_id=request_id, **sampling))

    def get_tokenizer(self) -> "Tokenizer":
        """The served tokenizer, fetched once. Raises UnsupportedError if there is none."""
        return self._call(self._client.get_tokenizer())

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once the coordinator serves. Raises UnavailableError if it does not within `timeout` seconds."""
        self._call(self._client.wait_ready(timeout))

    def close(self) -> None:
        """Ends all generations, the connection and the thread; may be called again."""
        self._finalizer()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs it on the thread's loop; whatever interrupts the wait (Ctrl-C, say) cancels it."""
        try:
            self._check_usable()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise UnavailableError("the client was closed while a call was running") from None
        except BaseException:
            future.cancel()
            raise

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise FailedPreconditionError("the client was made before a fork, and its thread exists only there; make a new one in this process")
        if not self._finalizer.alive or not self._thread.is_alive():
            raise FailedPreconditionError("the client is closed; make a new one")


class TokenStream:
    """An iterator over a generation's events, sent off by the first read. A reader that falls behind gets longer events.

    Leaving it early in any way (break, an exception, `close`, `with`) ends the generation.
    """

    def __init__(self, client: Client, stream: AsyncTokenStream) -> None:
        self._client = client
        self._stream = stream

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> StreamEvent:
        """The next event. Raises SpecwireError as AsyncTokenStream does."""
        event = self._client._call(_next(self._stream))
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Ends the generation, if it still runs; may be called again, also after its client was closed."""
        if self._client._finalizer.alive:
            self._client._call(self._stream.aclose())

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


async def _next(stream: AsyncTokenStream) -> StreamEvent | None:
    return await anext(stream, None)


def _shut_down(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """Runs once: at `close`, when the client is collected, or at the program's end."""
    if os.getpid() != pid or not thread.is_alive():
        return
    closing = asyncio.run_coroutine_threadsafe(_close(client), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:  # the collector may run anywhere
        thread.join(_CLOSE_TIMEOUT_S)
        if not thread.is_alive():
            loop.close()


async def _close(client: AsyncClient) -> None:
    await client.close()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
