"""Scripted services inside one process: the coordinator's peers without gRPC, so that thousands of steps take seconds."""

import asyncio
import dataclasses
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from specwire.errors import AbortedError, InvalidArgumentError, SpecwireError, UnavailableError
from specwire.messages import DraftResult, DraftRound, RoundTiming, ServiceDescription, TokenizerSpec, VerifyResult, VerifyRound, Welcome
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.verifier import ScriptedVerifier


class LocalNetwork:
    """Services by address. `put` starts or restarts one, `kill` ends its streams and makes it unreachable."""

    def __init__(self) -> None:
        self._services: dict[str, ScriptedVerifier | ScriptedDrafter] = {}
        self._streams: dict[str, set[_LocalStream]] = {}
        self._arrivals: dict[str, asyncio.Event] = {}
        self.names: dict[str, list[str]] = {}

    def put(self, address: str, service: ScriptedVerifier | ScriptedDrafter) -> None:
        self.kill(address)
        self._services[address] = service
        self._arrivals.setdefault(address, asyncio.Event()).set()

    def kill(self, address: str, error: SpecwireError | None = None) -> None:
        self._services.pop(address, None)
        self._arrivals.setdefault(address, asyncio.Event()).clear()
        self.cut(address, error)

    def cut(self, address: str, error: SpecwireError | None = None) -> None:
        """Ends the streams to a service that stays."""
        for stream in list(self._streams.get(address, ())):
            stream.end(error or UnavailableError(f"{address} was killed"))

    async def resolve(self, host: str, port: int) -> list[str]:
        """coordinator.discovery.Resolver: hosts that are not in `names` stand for themselves."""
        return list(self.names.get(host, [host]))

    def drain(self, address: str) -> None:
        """A service says that it is about to stop and takes no further streams."""
        self._services[address].is_draining = True
        for stream in self._streams.get(address, ()):
            stream.announce_end()

    def num_streams(self, address: str) -> int:
        return len(self._streams.get(address, ()))

    def connect_verifier(self, address: str, max_message_bytes: int, server_name: str = "") -> "LocalVerifierPeer":
        return LocalVerifierPeer(self, address)

    def connect_drafter(self, address: str, max_message_bytes: int, server_name: str = "") -> "LocalDrafterPeer":
        return LocalDrafterPeer(self, address)

    async def wait_for(self, address: str) -> Any:
        await self._arrivals.setdefault(address, asyncio.Event()).wait()
        return self._services[address]

    def get(self, address: str) -> Any:
        return self._services.get(address)

    def enter(self, address: str, stream: "_LocalStream") -> None:
        self._streams.setdefault(address, set()).add(stream)

    def leave(self, address: str, stream: "_LocalStream") -> None:
        self._streams.get(address, set()).discard(stream)


class LocalVerifierPeer:
    """coordinator.peers.VerifierPeer over a LocalNetwork."""

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def describe(self) -> ServiceDescription:
        return (await self._network.wait_for(self._address)).describe()

    async def get_tokenizer(self) -> TokenizerSpec:
        return (await self._network.wait_for(self._address)).tokenizer()

    def open_stream(self) -> "_LocalVerifyStream":
        return _LocalVerifyStream(self._network, self._address)

    async def close(self) -> None:
        pass


class LocalDrafterPeer:
    """coordinator.peers.DrafterPeer over a LocalNetwork."""

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def describe(self) -> ServiceDescription:
        return (await self._network.wait_for(self._address)).describe()

    def open_stream(self) -> "_LocalDraftStream":
        return _LocalDraftStream(self._network, self._address)

    async def close(self) -> None:
        pass


class _LocalStream(ABC):
    """Both ends of a stream; `_work` is the service's end."""

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._service = network.get(address)
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._outbox: deque[Any] = deque()
        self._has_mail = asyncio.Event()
        network.enter(address, self)
        self._task = asyncio.create_task(self._run())
        if self._service is None:
            self.end(UnavailableError(f"{address} is not there"))

    def send(self, message: Any) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    async def receive(self) -> Any:
        item = await self._inbox.get()
        if isinstance(item, SpecwireError):
            self._inbox.put_nowait(item)
            raise item
        return item

    def end(self, error: SpecwireError) -> None:
        self._inbox.put_nowait(error)
        self.close()

    def close(self) -> None:
        self._network.leave(self._address, self)
        self._task.cancel()
        self._end_session()

    async def _run(self) -> None:
        try:
            await self._serve()
        except SpecwireError as error:
            self.end(error)

    @abstractmethod
    async def _serve(self) -> None:
        """Answers rounds until cancelled."""

    @abstractmethod
    def announce_end(self) -> None:
        """The service tells the client to go on elsewhere."""

    @abstractmethod
    def _end_session(self) -> None:
        """Frees what the stream held."""

    async def _next(self) -> Any:
        while not self._outbox:
            self._has_mail.clear()
            await self._has_mail.wait()
        return self._outbox.popleft()


class _LocalVerifyStream(_LocalStream):
    _session = None

    def send(self, message: VerifyRound) -> None:
        """Rounds are received at once, so that their closes take effect before queued rounds are launched."""
        if message.round and self._session is not None:
            try:
                self._service.receive(self._session, message)
            except SpecwireError as error:
                self.end(error)
        super().send(message)

    async def _serve(self) -> None:
        verifier: ScriptedVerifier = self._service
        hello = (await self._next()).hello
        self._session, welcome = verifier.open_session(hello)
        self._session.on_taken_over = lambda: self.end(AbortedError("taken over by another stream of this coordinator"))
        self._inbox.put_nowait(VerifyResult(0, 0, 0, welcome=welcome))
        while True:
            message = await self._next()
            started_ns = time.time_ns()
            result = verifier.launch(self._session)
            await pause(verifier.script.delay_s, message)
            verifier.answered(self._session)
            if verifier.script.tells_times:
                timing = dataclasses.replace(timing_since(started_ns), received_ns=message.sent_ns or started_ns)
                result = dataclasses.replace(result, timing=timing)
            self._inbox.put_nowait(result)

    def announce_end(self) -> None:
        self._inbox.put_nowait(VerifyResult(0, 0, 0, draining=True))

    def _end_session(self) -> None:
        if self._session is not None and not self._session.is_over:
            self._service.end_session(self._session)


class _LocalDraftStream(_LocalStream):
    _session = None

    async def _serve(self) -> None:
        drafter: ScriptedDrafter = self._service
        first: DraftRound = await self._next()
        if first.hello is None:
            raise InvalidArgumentError("the first message has no hello")
        self._session = drafter.open_session()
        self._inbox.put_nowait(DraftResult(0, 0, 0, welcome=Welcome(drafter.instance_id, 8)))
        while True:
            message = await self._next()
            started_ns = time.time_ns()
            await pause(drafter.script.delay_s, message)
            result = drafter.answer(self._session, message)
            if result is not None and drafter.script.tells_times:
                result = dataclasses.replace(result, timing=timing_since(started_ns))
            if result is not None:
                self._inbox.put_nowait(result)

    def announce_end(self) -> None:
        self._inbox.put_nowait(DraftResult(0, 0, 0, draining=True))

    def _end_session(self) -> None:
        if self._session is not None:
            self._service.end_session(self._session)


def timing_since(started_ns: int) -> RoundTiming:
    """Of a message that came when its work began, and whose answer leaves now."""
    now_ns = time.time_ns()
    return RoundTiming(started_ns, started_ns, now_ns, now_ns)


async def pause(delay_s: float | Callable[[Any], float], message: Any) -> None:
    await asyncio.sleep(delay_s(message) if callable(delay_s) else delay_s)
