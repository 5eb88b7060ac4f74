"""One Session stream for all requests of a client: written by one task, read by another, which puts each update into its request's inbox."""

import asyncio
import itertools
import logging

import grpc

from specwire.client.rpc import PackedStart, SessionCall, pack_start
from specwire.errors import InternalError, ResourceExhaustedError, SpecwireError, UnavailableError
from specwire.messages import ChoiceDelta, ErrorStatus, GenerateRequest, SessionStart, SessionUpdate
from specwire.pending import RequestSink
from specwire.statuses import error_from_status

logger = logging.getLogger(__name__)

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
_INTERNAL = grpc.StatusCode.INTERNAL.value[0]
_MESSAGE_OVERHEAD = 64


class LiveRequest:
    """A started request. A reader that falls behind finds what it missed as one delta a choice."""

    def __init__(self, session: "Session", stream_id: int, num_choices: int, *, whole: bool) -> None:
        self._session = session
        self._stream_id = stream_id
        self._wake = wake = asyncio.Event()
        # Not with `self`, which holds it: a circle stays in memory until the collector comes.
        self.inbox = RequestSink(num_choices, lambda _: wake.set(), whole=whole)

    async def read(self) -> list[ChoiceDelta]:
        """What came since the last read, one delta a choice; with `whole` everything. Empty after the end.

        Raises:
            SpecwireError: the request failed; what came before it is read first.
        """
        while True:
            await self._wake.wait()
            deltas = [pending.to_delta() for pending in self.inbox.take()]
            if not self.inbox.ended:
                self._wake.clear()
            if deltas:
                return deltas
            if self.inbox.error is not None:
                raise error_from_status(self.inbox.error)
            if self.inbox.ended:
                return []

    def cancel(self) -> None:
        """Ends the request at the coordinator unless it has ended; for whoever stops reading."""
        if not self.inbox.ended:
            self._session.cancel(self._stream_id)


class Session:
    """Opens a stream when it is asked to or with the first request, and a new one after it broke.

    Args:
        channel: to the coordinator.
        address: of it, for messages.
        max_message_bytes: a request that is larger is refused before it is sent, since it would end the stream for all.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, max_message_bytes: int) -> None:
        self._channel = channel
        self._address = address
        self._max_message_bytes = max_message_bytes - _MESSAGE_OVERHEAD
        self._stream_ids = itertools.count(1)
        self._live: dict[int, LiveRequest] = {}
        self._starts: dict[int, tuple[PackedStart, int]] = {}  # not sent yet, with their bytes
        self._cancels: list[int] = []
        self._has_mail = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self.num_breaks = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a stream."""
        return self._reader is not None

    def move(self, channel: grpc.aio.Channel) -> None:
        """The next stream is one of this channel."""
        self._channel = channel

    def open(self) -> None:
        """Sees to it that there is a stream. Its end is how the coordinator says that it serves another model, or goes away."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._run(SessionCall(self._channel)))

    def start(self, request: GenerateRequest, *, whole: bool) -> LiveRequest:
        """Sends a request.

        Raises:
            ResourceExhaustedError: it is larger than a message may be.
            InvalidArgumentError: it can't be packed.
        """
        stream_id = next(self._stream_ids)
        packed, num_bytes = pack_start(SessionStart(stream_id, request))
        if num_bytes > self._max_message_bytes:
            text = f"the request takes {num_bytes} bytes, but a message may have {self._max_message_bytes}"
            raise ResourceExhaustedError(f"{text}; send a shorter prompt or raise max_message_mb")
        live = self._live[stream_id] = LiveRequest(self, stream_id, request.sampling.n, whole=whole)
        self._starts[stream_id] = packed, num_bytes
        self._has_mail.set()
        self.open()
        return live

    def cancel(self, stream_id: int) -> None:
        """Stops listening to a request, and tells the coordinator if it knows of it."""
        if self._live.pop(stream_id, None) is not None and self._starts.pop(stream_id, None) is None:
            self._cancels.append(stream_id)
            self._has_mail.set()

    async def close(self) -> None:
        """Ends the stream and fails what still runs."""
        reader = self._reader
        if reader is not None:
            reader.cancel()
            await asyncio.wait([reader])
            if self._reader is reader:  # it was cancelled before its first step
                self._fail_all(UnavailableError("the client was closed"))

    async def _run(self, call: SessionCall) -> None:
        """Reads until the stream ends, then fails what was running on it."""
        writer = asyncio.create_task(self._write(call))
        error: Exception = UnavailableError("the client was closed")
        try:
            while True:
                self._route(await call.read())
        except SpecwireError as failure:
            error = failure
        except Exception as failure:
            logger.exception("reading from the coordinator at %s failed", self._address)
            error = InternalError(f"{type(failure).__name__} while reading an update")
        finally:
            writer.cancel()
            call.cancel()
            self._fail_all(error)

    async def _write(self, call: SessionCall) -> None:
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            while self._starts or self._cancels:
                await call.write(*self._take_mail())

    def _take_mail(self) -> tuple[list[PackedStart], list[int]]:
        """What one message may hold of the starts, and all cancels: they are of requests that were sent before."""
        cancels, self._cancels = self._cancels, []
        starts: list[PackedStart] = []
        room = self._max_message_bytes - 10 * len(cancels)
        for stream_id, (packed, num_bytes) in list(self._starts.items()):
            room -= num_bytes + _MESSAGE_OVERHEAD
            if starts and room < 0:
                break
            starts.append(packed)
            del self._starts[stream_id]
        return starts, cancels

    def _route(self, update: SessionUpdate) -> None:
        """Updates of requests that were cancelled here find no inbox."""
        for stream_id, choice_index, token_ids, origins in update.deltas:
            if (live := self._live.get(stream_id)) is not None:
                live.inbox.delta(choice_index, token_ids, origins)
        for event in update.events:
            if (live := self._live.get(event.stream_id)) is None:
                continue
            if event.choice is not None:
                live.inbox.choice(event.choice)
            if event.error is not None:
                live.inbox.fail(event.error)
            if event.done:
                live.inbox.fail(ErrorStatus(_INTERNAL, "the coordinator ended the request before all of its choices"))  # ignored after an end
                del self._live[event.stream_id]

    def _fail_all(self, error: Exception) -> None:
        live, self._live = self._live, {}
        self._starts.clear()
        self._cancels.clear()
        self._reader = None
        self.num_breaks += 1
        status = ErrorStatus(_UNAVAILABLE, f"the connection to the coordinator at {self._address} broke: {error}")
        for request in live.values():
            request.inbox.fail(status)
