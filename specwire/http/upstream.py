"""The coordinator as the HTTP process calls it: with the API keys of its callers, one client each, and once for itself."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from specwire.client import AsyncClient
from specwire.config import HttpConfig
from specwire.errors import InvalidArgumentError, SpecwireError, UnauthenticatedError, UnsupportedError
from specwire.http.failures import Refusal
from specwire.http.token_text import TokenTexts
from specwire.tls import TlsOptions
from specwire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_IDLE_CLIENTS = 256
"""Connections kept for API keys that nobody uses at the moment."""
_FRESH_S = 60.0
_STALE_S = 1.0
_SCHEME = "bearer"
_WRONG_HEADER = "the Authorization header must be `Bearer KEY`, with an API key exactly as it was made; correct it, or leave it out"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the coordinator serves: the name of the model, and how long a sequence may be."""

    name: str
    max_model_len: int


class Caller:
    """The coordinator for the callers that bring one API key.

    Args:
        client: with that key.
        names: that requests may give as `model`; none = the coordinator's own.
    """

    def __init__(self, client: AsyncClient, names: tuple[str, ...]) -> None:
        self.client = client
        self.num_users = 0
        self._names = names
        self._model: tuple[int, float, ServedModel] | None = None
        self._texts: tuple[Tokenizer, TokenTexts] | None = None

    async def check_model(self, name: str | None) -> ServedModel:
        """The served model. Raises Refusal if a request asks for another one."""
        await self.tokenizer()  # from now on the connection breaks when the model changes
        model = await self.model(_FRESH_S)
        if name is None or name in self.names(model):
            return model
        model = await self.model(_STALE_S)  # it may have become another one
        if name in self.names(model):
            return model
        text = f"model is {name[:200]!r}, which is not served; choose {' or '.join(map(repr, self.names(model)))}, or leave it out"
        raise Refusal(text, status=404, param="model", code="model_not_found")

    def names(self, model: ServedModel) -> tuple[str, ...]:
        """What the model is called, the name that answers give first."""
        return self._names or (model.name,)

    async def model(self, max_age_s: float = 0.0) -> ServedModel:
        """The served model, as it was at most so many seconds ago, and not before the connection broke."""
        num_breaks = self.client.num_breaks
        if self._model is None or self._model[0] != num_breaks or time.monotonic() - self._model[1] > max_age_s:
            status = await self.client.get_status()
            self._model = num_breaks, time.monotonic(), ServedModel(status.model_id, status.max_model_len)
        return self._model[2]

    async def tokenizer(self) -> Tokenizer | None:
        """The served tokenizer; None if there is none."""
        try:
            return await self.client.get_tokenizer()
        except UnsupportedError:
            return None

    def texts(self, tokenizer: Tokenizer) -> TokenTexts:
        """What single tokens of it stand for."""
        if self._texts is None or self._texts[0] is not tokenizer:
            self._texts = tokenizer, TokenTexts(tokenizer)
        return self._texts[1]


class Upstream:
    """All callers' clients.

    Args:
        config: where the coordinator is, and how it is called.

    Attributes:
        own: the process's own client, with the API key of its environment. Never for what somebody asks for.
    """

    def __init__(self, config: HttpConfig) -> None:
        tls = None
        if config.coordinator_tls_ca or config.coordinator_tls_cert:
            tls = TlsOptions(config.coordinator_tls_ca, config.coordinator_tls_cert, config.coordinator_tls_key)
        # Whoever calls decides about further attempts: OpenAI's clients make them by themselves.
        self.own = AsyncClient(config.coordinator, max_message_mb=config.max_message_mb, max_retries=0, tls=tls)
        self._names = config.served_model_name
        self._callers: OrderedDict[str, Caller] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def caller(self, authorization: str | None) -> Iterator[Caller]:
        """The client of whoever sends this header, for as long as it is used.

        Raises:
            UnauthenticatedError: the header has no key. Whether the key is a good one is for the coordinator to say.
        """
        key = _read_key(authorization)
        caller = self._callers.get(key)
        if caller is None:
            try:
                caller = self._callers[key] = Caller(self.own.with_api_key(key), self._names)
            except InvalidArgumentError as error:
                raise UnauthenticatedError(str(error)) from None
        caller.num_users += 1
        self._callers.move_to_end(key)
        try:
            yield caller
        except UnauthenticatedError:
            self._drop(key, caller)
            raise
        finally:
            caller.num_users -= 1
            self._shrink()

    async def prepare(self) -> None:
        """Loads the tokenizer, which takes a third of a second: callers share it, so that the first request of a process takes no longer."""
        try:
            await self.own.get_tokenizer()
        except UnsupportedError:
            pass  # requests have token ids
        except SpecwireError as error:
            logger.info("the tokenizer is loaded with the first request that needs it: %s", error)

    async def close(self) -> None:
        """Ends all generations and connections."""
        callers, self._callers = self._callers, OrderedDict()
        await asyncio.gather(self.own.close(), *(caller.client.close() for caller in callers.values()), *self._closing)

    def _shrink(self) -> None:
        """Drops those that were not used for longest, if there are more idle ones than are kept."""
        if len(self._callers) <= MAX_IDLE_CLIENTS:
            return
        idle = [(key, caller) for key, caller in self._callers.items() if not caller.num_users]
        for key, caller in idle[: max(0, len(idle) - MAX_IDLE_CLIENTS)]:
            self._drop(key, caller)

    def _drop(self, key: str, caller: Caller) -> None:
        """Forgets a client, unless somebody else still uses it."""
        if caller.num_users > 1 or self._callers.get(key) is not caller:
            return
        del self._callers[key]
        task = asyncio.create_task(caller.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _read_key(authorization: str | None) -> str:
    """Empty without a header."""
    if authorization is None:
        return ""
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != _SCHEME or not key.strip():
        raise UnauthenticatedError(_WRONG_HEADER)
    return key.strip()
