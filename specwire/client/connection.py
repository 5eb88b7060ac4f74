"""What belongs to one event loop of one process: the channel, the session on it and the served tokenizer."""

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING

import grpc

from specwire.channel import ChannelSource, Metadata
from specwire.client.home import GRPC_USE, Home
from specwire.client.reach import explain
from specwire.client.rpc import fetch_tokenizer
from specwire.client.session import Session
from specwire.errors import InvalidArgumentError, UnavailableError
from specwire.messages import TokenizerSpec
from specwire.rpc import open_channel
from specwire.tls import TlsOptions

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer


class TokenizerCache:
    """The tokenizer that was last loaded, for connections that are served the same one: a large vocabulary takes time and memory."""

    def __init__(self) -> None:
        self._loading = asyncio.Lock()
        self._loaded: tuple[TokenizerSpec, Tokenizer] | None = None

    async def load(self, spec: TokenizerSpec) -> "Tokenizer":
        async with self._loading:
            if self._loaded is None or self._loaded[0] != spec:
                # Reading a large vocabulary takes a good part of a second.
                self._loaded = spec, await asyncio.to_thread(_load_tokenizer, spec)
            return self._loaded[1]


class Connection:
    """A channel to a coordinator, which connects when it is first used and again after it broke: with new certificates, if there are any."""

    def __init__(
        self, address: str, max_message_bytes: int, tokenizers: TokenizerCache, tls: TlsOptions | None = None, metadata: Metadata = ()
    ) -> None:
        GRPC_USE.note()
        self.home = Home("the client")
        self._address = address
        # Streams of tokens: seconds of them would wait on the way to a reader that falls behind, one small message a step. If they don't fit
        # there, the coordinator makes one of several.
        self._open = functools.partial(open_channel, address, max_message_bytes, tls=tls, metadata=metadata)
        self._source = ChannelSource(functools.partial(self._open, reads_ahead=False), tls)
        self.channel = self._source.open()
        self._fetch_channel: grpc.aio.Channel | None = None
        self.session = Session(self.channel, address, max_message_bytes)
        self._fetching = asyncio.Lock()
        self._tokenizers = tokenizers
        self._tokenizer: tuple[int, Tokenizer | None] | None = None
        self._closed = asyncio.Event()

    async def tokenizer(self) -> "Tokenizer | None":
        """Fetched once for as long as the session holds, which is opened then: another coordinator, or model, may answer after it broke.

        Raises:
            UnavailableError: it can't be fetched, or the connection was closed meanwhile.
        """
        async with self._fetching:
            self._check_open()
            if self._tokenizer is None or self._tokenizer[0] != self.session.num_breaks:
                num_breaks = self.session.num_breaks
                await self._renew()
                try:
                    spec = await self._fetch_tokenizer()
                except UnavailableError as error:
                    raise explain(error, self._address) from None
                except asyncio.CancelledError:
                    # Closing a channel cancels whoever waits for its calls, as if their tasks had been cancelled.
                    self._check_open()
                    raise
                self._check_open()
                self.session.open()
                self._tokenizer = num_breaks, None if spec is None else await self._tokenizers.load(spec)
            self._check_open()
            return self._tokenizer[1]

    async def pause(self, seconds: float) -> None:
        """Lets time pass. Raises UnavailableError if the connection is closed meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        self._check_open()

    async def renewed_channel(self) -> grpc.aio.Channel:
        """The channel, with certificates that have changed, unless a session still uses it with the ones before."""
        await self._renew()
        return self.channel

    async def close(self) -> None:
        self._closed.set()
        await self.session.close()
        await self.channel.close()
        if self._fetch_channel is not None:
            await self._fetch_channel.close()

    async def _fetch_tokenizer(self) -> TokenizerSpec | None:
        """On a channel of its own: megabytes, at once. On the present one if TLS files have changed to what can't be used, which its source said."""
        try:
            self._fetch_channel = self._open()
        except InvalidArgumentError:
            return await fetch_tokenizer(self.channel)
        try:
            return await fetch_tokenizer(self._fetch_channel)
        finally:
            channel, self._fetch_channel = self._fetch_channel, None
            await channel.close()

    async def _renew(self) -> None:
        """Takes over certificates that have changed, unless the present connection is in use."""
        channel = None if self.session.is_open else self._source.renew()
        if channel is not None:
            old, self.channel = self.channel, channel
            self.session.move(channel)
            await old.close()

    def _check_open(self) -> None:
        task = asyncio.current_task()
        if self._closed.is_set() and not (task and task.cancelling()):
            raise UnavailableError(f"the connection to the coordinator at {self._address} is gone: the client was closed")


def _load_tokenizer(spec: TokenizerSpec) -> "Tokenizer":
    from specwire.tokenizer import Tokenizer  # loads libraries that a client of token ids never needs

    return Tokenizer(spec)
