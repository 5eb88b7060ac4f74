"""How a client's calls reach its coordinator: over one connection at a time, and again after an error that passes."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from specwire.channel import Metadata
from specwire.client.connection import Connection, TokenizerCache
from specwire.client.generation import Deadline, Generation, Retries
from specwire.client.prompts import CheckedPrompt, check_label, encode_prompt
from specwire.client.results import GenerationResult
from specwire.client.stream import read_result
from specwire.errors import FailedPreconditionError, SpecwireError
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.tls import TlsOptions
from specwire.tracing.context import current_traceparent

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Attempts:
    """Everything of an AsyncClient that is no argument of a call; arguments as there."""

    def __init__(
        self, address: str, max_message_bytes: int, max_retries: int, tls: TlsOptions | None, metadata: Metadata, tenant_cache_key: bytes
    ) -> None:
        self.address = address
        self.max_message_bytes = max_message_bytes
        self.retries = Retries(max_retries)
        self.tls = tls
        self.tenant_cache_key = tenant_cache_key
        self.tokenizers = TokenizerCache()
        self._metadata = metadata
        self._connection: Connection | None = None
        self._closed = False

    def connect(self) -> Connection:
        """The connection, which connects when it is first used. Raises FailedPreconditionError if the client is closed or used elsewhere."""
        if self._closed:
            raise FailedPreconditionError("the client is closed; make a new one")
        if self._connection is None:
            self._connection = Connection(self.address, self.max_message_bytes, self.tokenizers, self.tls, self._metadata)
        self._connection.home.check()
        return self._connection

    async def call(self, call: Callable[[Connection], Awaitable[Result]], deadline: Deadline, *, waits_for_room: bool = True) -> Result:
        """Makes a call, and makes it again after an error that passes.

        Args:
            waits_for_room: a full queue is such an error.
        """
        num_failures = 0
        while True:
            connection = self.connect()
            try:
                return await call(connection)
            except SpecwireError as error:
                num_failures += 1
                pause_s = self.retries.pause_s(error, num_failures, deadline, waits_for_room=waits_for_room)
                if pause_s is None or self._closed:
                    raise
                logger.debug("attempt %d at %s failed and is repeated in %.2f s: %s", num_failures, self.address, pause_s, error)
            await connection.pause(pause_s)
            self.retries.count()

    async def generate(
        self, prompt: CheckedPrompt, params: SamplingParams, deadline: Deadline, request_id: str, variant: str, *, waits_for_room: bool
    ) -> GenerationResult:
        """Generates everything, again where it failed: nobody has seen any of it."""

        async def attempt(connection: Connection) -> GenerationResult:
            return await read_result(await self.start(connection, prompt, params, deadline, request_id, variant, whole=True))

        async with deadline.limit():
            return await self.call(attempt, deadline, waits_for_room=waits_for_room)

    async def start(
        self, connection: Connection, prompt: CheckedPrompt, params: SamplingParams, deadline: Deadline, request_id: str, variant: str, *, whole: bool
    ) -> Generation:
        """Sends a request and waits for its first tokens, or, with whole, for all of them."""
        tokenizer = await connection.tokenizer()
        prompt_token_ids = encode_prompt(prompt, tokenizer, self.address)
        request = GenerateRequest(
            prompt_token_ids,
            params,
            request_id,
            self.tenant_cache_key,
            check_label("variant", variant),
            timeout_ms=deadline.remaining_ms,
            traceparent=current_traceparent(),
        )
        live = connection.session.start(request, whole=whole)
        try:
            return Generation(prompt_token_ids, params, live, tokenizer, await live.read())
        except BaseException:
            live.cancel()
            raise

    async def close(self) -> None:
        """Ends all generations and the connection; may be called again."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not connection.home.is_here:
            logger.warning("a client of %s is closed outside of its event loop: its connection is dropped", self.address)
            return
        await connection.close()
