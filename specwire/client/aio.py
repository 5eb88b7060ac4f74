"""The asynchronous client."""

import functools
import os
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from specwire.channel import bearer
from specwire.client import service
from specwire.client.arguments import DEFAULT_CONCURRENCY, Prompts, check_client, check_concurrency, items_of_batch, make_params
from specwire.client.attempts import Attempts
from specwire.client.batch import AsyncBatch
from specwire.client.connection import Connection
from specwire.client.generation import Deadline, Generation
from specwire.client.prompts import BatchItem, Chat, Prompt, check_label, check_prompt
from specwire.client.results import GenerationResult
from specwire.client.session import LiveRequest
from specwire.client.stream import AsyncTokenStream
from specwire.config import API_KEY_VARIABLE, DEFAULT_ADDRESS
from specwire.errors import UnsupportedError
from specwire.messages import CanaryAction, CoordinatorStatus, GenerateRequest, VariantStatus
from specwire.sampling_params import SamplingParams
from specwire.tls import TlsOptions

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer


class AsyncClient:
    """A client of one coordinator; belongs to the event loop that first uses it. All its requests share one stream.

    A request is sent again, up to `max_retries` times and inside its timeout, if the coordinator was not there, went away or said when to come
    back, and the caller has seen nothing of the answer: a stream that has given a token never is.

    Args:
        address: `host:port`, `dns:///host:port` or `unix:path`.
        max_message_mb: largest message either way in MiB; at most the coordinator's own limit.
        max_retries: most further attempts of a request; 0 = none.
        tls: connect with TLS; its files are read anew for every connection.
        api_key: for coordinators that need one; default: the environment's SPECWIRE_API_KEY.
        tenant_cache_key: requests share cached prefixes only with requests of an equal key (and of the same API key).

    Raises:
        InvalidArgumentError: an argument that can't be one. A file of tls that can't be used is an error of the first call.
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
        check_client(address, max_message_mb, tls, api_key, tenant_cache_key)
        metadata = bearer(os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key)
        self._attempts = Attempts(address, max_message_mb << 20, max_retries, tls, metadata, tenant_cache_key)

    def with_api_key(self, api_key: str) -> "AsyncClient":
        """A client of the same coordinator, otherwise like this one, for another API key; empty = without any. For programs that call for many
        users, in one event loop: each client has its own connection, but equal tokenizers are loaded once. Close it like any other.

        Raises:
            InvalidArgumentError: a key that no header can carry.
        """
        own = self._attempts
        client = AsyncClient(
            own.address,
            max_message_mb=own.max_message_bytes >> 20,
            max_retries=own.retries.max_retries,
            tls=own.tls,
            api_key=api_key,
            tenant_cache_key=own.tenant_cache_key,
        )
        client._attempts.tokenizers = own.tokenizers
        return client

    @property
    def num_retries(self) -> int:
        """Attempts so far that followed another one of the same request."""
        return self._attempts.retries.num_retries

    @property
    def num_breaks(self) -> int:
        """How often the connection broke since it was made: what another coordinator or model answers differently is to be asked for again then."""
        return self._attempts.connect().session.num_breaks

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        variant: str = "",
        **sampling: Any,
    ) -> GenerationResult:
        """Generates and returns everything at the end; cancelling the task ends the generation.

        Args:
            prompt: text, token ids, or a Chat.
            params: sampling parameters; the defaults of SamplingParams if left out.
            timeout: seconds for everything, waiting in the coordinator's queue included.
            request_id: a label for logs and traces.
            variant: base or canary, while a canary runs; empty = by its share.
            **sampling: single sampling parameters by name, over `params`.

        Raises:
            InvalidArgumentError: a wrong parameter or prompt; nothing was generated.
            DeadlineExceededError: the timeout passed.
            ResourceExhaustedError: the coordinator's queue is full, or the request is too large.
            UnavailableError: there is no coordinator, or it went away.
            UnsupportedError: the prompt is not token ids, but no tokenizer is served.
            FailedPreconditionError: the client is closed or used elsewhere than it belongs; or there is no chat template for a Chat.
        """
        return await self._run(prompt, make_params(params, sampling), timeout, request_id, variant, waits_for_room=True)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        variant: str = "",
        **sampling: Any,
    ) -> AsyncTokenStream:
        """Generates and returns an asynchronous iterator over what comes; arguments and errors as in `generate`.

        Use it in `async with` where leaving it early must end the generation at once.
        """
        params, prompt, deadline = make_params(params, sampling), check_prompt(prompt), Deadline(timeout)
        label = check_label("request_id", request_id)

        async def start(connection: Connection) -> Generation:
            return await self._attempts.start(connection, prompt, params, deadline, label, variant, whole=False)

        return AsyncTokenStream(functools.partial(self._attempts.call, start, deadline), deadline)

    async def chat(
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
        """Answers a conversation: `generate` with a Chat of these messages; arguments as in Chat and `generate`."""
        prompt = Chat(messages, tools, add_generation_prompt, chat_template_kwargs)
        return await self.generate(prompt, params, timeout=timeout, request_id=request_id, **sampling)

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
    ) -> AsyncTokenStream:
        """Answers a conversation: `stream` with a Chat of these messages; arguments as in Chat and `generate`."""
        prompt = Chat(messages, tools, add_generation_prompt, chat_template_kwargs)
        return self.stream(prompt, params, timeout=timeout, request_id=request_id, **sampling)

    def generate_batch(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        request_id: str = "",
        max_concurrency: int = DEFAULT_CONCURRENCY,
        **sampling: Any,
    ) -> AsyncBatch:
        """Generates for many prompts and returns an asynchronous iterator over (index, result or SpecwireError) as they end.

        A prompt that fails gives its error, and the others go on. A full queue makes the batch wait for its own requests, not fail.

        Args:
            prompts: text, token ids, Chats, or BatchItems with parameters of their own, in any mixture; an iterable, or an asynchronous one.
                Prompts are taken from it as they can be sent.
            params: sampling parameters for all, or a list with those of each prompt (then all prompts are taken at once).
            timeout: seconds for each prompt, from when it is sent; the time that it waits in the batch is not counted.
            request_id: a label; each prompt gets it with its index, as "label-17".
            max_concurrency: most prompts on the way at once.
            **sampling: single sampling parameters by name, over `params`.

        Raises:
            InvalidArgumentError: a wrong parameter, or a list of params of another length than the prompts. What the iterable itself raises
                ends the batch.
        """
        Deadline(timeout), check_label("request_id", request_id)  # says now what is wrong with them
        items, shared = items_of_batch(prompts, params, sampling)

        def run(index: int, item: Prompt | BatchItem) -> Awaitable[GenerationResult]:
            label = f"{request_id}-{index}" if request_id else ""
            if not isinstance(item, BatchItem):
                return self._run(item, shared, timeout, label, waits_for_room=False)
            own = shared if item.params is None else make_params(item.params, sampling)
            own_label = label if item.request_id == "" else item.request_id
            return self._run(item.prompt, own, timeout if item.timeout is None else item.timeout, own_label, waits_for_room=False)

        return AsyncBatch(items, run, self._attempts.connect, check_concurrency(max_concurrency))

    async def start(self, request: GenerateRequest) -> LiveRequest:
        """Sends a request as it is: not one of the calls for users, but of the load generator, which counts tokens and must not take the time to
        make text of them. No retries, no timeout of the client's, no check of the prompt. Cancel what is returned when you stop reading it.

        Raises:
            ResourceExhaustedError: the request is larger than a message may be.
        """
        return self._attempts.connect().session.start(request, whole=False)

    async def get_tokenizer(self) -> "Tokenizer":
        """The served tokenizer, fetched once. Raises UnsupportedError if there is none."""
        tokenizer = await self._attempts.call(Connection.tokenizer, Deadline(None))
        if tokenizer is None:
            raise UnsupportedError(f"the coordinator at {self._attempts.address} serves no tokenizer; send token ids instead of text")
        return tokenizer

    async def get_status(self, timeout: float = 10.0) -> CoordinatorStatus:
        """What the coordinator, its verifiers and its drafters do now.

        Raises:
            UnavailableError: there is no coordinator.
            DeadlineExceededError: it did not answer within `timeout` seconds.
        """
        return await service.read_status(self._attempts, timeout)

    async def set_canary(self, action: CanaryAction, *, share: float = 0.0, config: str = "", timeout: float = 10.0) -> tuple[VariantStatus, ...]:
        """Starts, changes or ends the coordinator's canary. Returns base and canary as they are then, after its end as they were.

        Args:
            share: of the requests, 0 to 1; for START and SET_SHARE.
            config: keys of the speculative configuration, as JSON; for START.

        Raises:
            InvalidArgumentError, UnsupportedError, FailedPreconditionError: it can't be done; the message says why.
            UnauthenticatedError: the API key may not.
            UnavailableError: there is no coordinator.
            DeadlineExceededError: it did not answer within `timeout` seconds.
        """
        return await service.set_canary(self._attempts, action, share, config, timeout)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once the coordinator serves. Raises UnavailableError if it does not within `timeout` seconds."""
        await service.wait_ready(self._attempts, timeout)

    def watch_serving(self) -> AsyncGenerator[bool, None]:
        """Whether the coordinator takes requests: as soon as it can be reached, and at every change; False when it goes away. Never ends."""
        return service.watch(self._attempts)

    async def close(self) -> None:
        """Ends all generations and the connection; may be called again."""
        await self._attempts.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(
        self, prompt: Prompt, params: SamplingParams, timeout: float | None, request_id: str, variant: str = "", *, waits_for_room: bool
    ) -> GenerationResult:
        """A batch itself waits for room in the coordinator's queue."""
        checked, deadline = check_prompt(prompt), Deadline(timeout)
        label = check_label("request_id", request_id)
        return await self._attempts.generate(checked, params, deadline, label, variant, waits_for_room=waits_for_room)
