"""The blocking client: the asynchronous one on an event loop of its own in a background thread."""

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from specwire.client.aio import AsyncClient
from specwire.client.arguments import DEFAULT_CONCURRENCY
from specwire.client.batch import Outcome, read_in_thread
from specwire.client.home import forked_error
from specwire.client.prompts import BatchItem, Chat, Prompt
from specwire.client.results import GenerationResult, StreamEvent
from specwire.config import DEFAULT_ADDRESS
from specwire.errors import FailedPreconditionError, UnavailableError
from specwire.messages import CanaryAction, CoordinatorStatus, VariantStatus
from specwire.sampling_params import SamplingParams
from specwire.tls import TlsOptions

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

Result = TypeVar("Result")
Item = TypeVar("Item")
Read = TypeVar("Read", covariant=True)

_CLOSE_TIMEOUT_S = 5.0


class Client:
    """A client of one coordinator for programs without an event loop; threads may share it. Arguments as in AsyncClient.

    Close it, or use it in `with`; one that is forgotten closes itself when it is collected or the program ends.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_message_mb: int = 64,
        max_retries: int = 2,
        tls: TlsOptions | None = None,
        api_key: str | None = None,
        tenant_cache_key: bytes = b"",
    ) -> None:
        self._client = AsyncClient(
            address, max_message_mb=max_message_mb, max_retries=max_retries, tls=tls, api_key=api_key, tenant_cache_key=tenant_cache_key
        )
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # In place of is_alive(): if Ctrl-C comes while that looks, Python 3.11 takes the thread for ended from then on.
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=_run, args=(self._loop, self._has_ended), name="specwire-client", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._client, self._loop, self._thread, self._pid)

    @property
    def num_retries(self) -> int:
        """Attempts so far that followed another one of the same request."""
        return self._client.num_retries

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        variant: str = "",
        **sampling: Any,
    ) -> GenerationResult:
        """Generates and returns everything at the end; arguments and errors as in AsyncClient.generate."""
        return self._call(self._client.generate(prompt, params, timeout=timeout, request_id=request_id, variant=variant, **sampling))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        variant: str = "",
        **sampling: Any,
    ) -> "TokenStream":
        """Generates and returns an iterator over what comes; arguments and errors as in AsyncClient.generate."""
        return TokenStream(self, self._client.stream(prompt, params, timeout=timeout, request_id=request_id, variant=variant, **sampling))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> GenerationResult:
        """Answers a conversation: `generate` with a Chat of these messages; arguments as in Chat and AsyncClient.generate."""
        prompt = Chat(messages, tools, add_generation_prompt, chat_template_kwargs)
        return self.generate(prompt, params, timeout=timeout, request_id=request_id, **sampling)

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> "TokenStream":
        """Answers a conversation: `stream` with a Chat of these messages; arguments as in Chat and AsyncClient.generate."""
        prompt = Chat(messages, tools, add_generation_prompt, chat_template_kwargs)
        return self.stream(prompt, params, timeout=timeout, request_id=request_id, **sampling)

    def generate_batch(
        self,
        prompts: Iterable[Prompt | BatchItem],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        max_concurrency: int = DEFAULT_CONCURRENCY,
        **sampling: Any,
    ) -> "Batch":
        """Generates for many prompts and returns an iterator over (index, result or SpecwireError) as they end; as AsyncClient.generate_batch.

        An iterable that is no list is read on a thread of its own, so that it may wait, or call this client.
        """
        # A list of params says that all prompts are taken at once.
        is_at_hand = isinstance(prompts, Sequence) or isinstance(params, Sequence)
        source = prompts if is_at_hand else read_in_thread(prompts)
        batch = self._client.generate_batch(source, params, timeout=timeout, request_id=request_id, max_concurrency=max_concurrency, **sampling)
        return Batch(self, batch)

    def get_tokenizer(self) -> "Tokenizer":
        """The served tokenizer, fetched once. Raises UnsupportedError if there is none."""
        return self._call(self._client.get_tokenizer())

    def get_status(self, timeout: float = 10.0) -> CoordinatorStatus:
        """What the coordinator, its verifiers and its drafters do now; errors as in AsyncClient.get_status."""
        return self._call(self._client.get_status(timeout))

    def set_canary(self, action: CanaryAction, *, share: float = 0.0, config: str = "", timeout: float = 10.0) -> tuple[VariantStatus, ...]:
        """Starts, changes or ends the coordinator's canary; arguments and errors as in AsyncClient.set_canary."""
        return self._call(self._client.set_canary(action, share=share, config=config, timeout=timeout))

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
            raise forked_error("the client")
        if threading.current_thread() is self._thread:
            raise FailedPreconditionError("the client was called by a finalizer on its own thread, which would wait for itself; use another client")
        if not self._finalizer.alive or self._has_ended.is_set():
            raise FailedPreconditionError("the client is closed; make a new one")


class _Source(Protocol[Read]):
    """What AsyncTokenStream and AsyncBatch have in common."""

    async def __anext__(self) -> Read: ...

    async def aclose(self) -> None: ...


class _Reader(Generic[Item]):
    """Reads an asynchronous iterator of a client from any thread."""

    def __init__(self, client: Client, source: _Source[Item]) -> None:
        self._client = client
        self._source = source

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """The next one. Raises SpecwireError as the asynchronous iterator does."""
        item = self._client._call(_next(self._source))
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Ends what still runs; may be called again, also after the client was closed."""
        if self._client._finalizer.alive:
            self._client._call(self._source.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TokenStream(_Reader[StreamEvent]):
    """An iterator over a generation's events, sent off by the first read. A reader that falls behind gets longer events.

    Leaving it early in any way (break, an exception, `close`, `with`) ends the generation.
    """


class Batch(_Reader[tuple[int, Outcome]]):
    """An iterator over (index of the prompt, its result or its error), in the order in which they end; as AsyncBatch.

    Leaving it early in any way (break, an exception, `close`, `with`) ends what runs.
    """


async def _next(source: _Source[Item]) -> Item | None:
    try:
        return await source.__anext__()
    except StopAsyncIteration:
        return None


def _run(loop: asyncio.AbstractEventLoop, has_ended: threading.Event) -> None:
    try:
        loop.run_forever()
    finally:
        has_ended.set()


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
