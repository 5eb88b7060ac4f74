"""Streams on which drafters pull features: one answer a request, in order. They end with the service, not with their clients."""

import asyncio
import time
from collections.abc import AsyncIterator

from specwire.errors import UnavailableError
from specwire.messages import FeaturePull, PulledFeatures

from .features import FeatureBooks
from .metrics import VerifierMetrics

_Item = FeaturePull | Exception | None


class FeatureStreams:
    """All of them. Everything runs in the event loop but what waits for a device.

    Args:
        books: of the open sequences.
        max_bytes: of one answer's features.
        metrics: takes the time of each answer.
    """

    def __init__(self, books: FeatureBooks, max_bytes: int, metrics: VerifierMetrics) -> None:
        self._books = books
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._inboxes: set[asyncio.Queue[_Item]] = set()

    async def answers(self, pulls: AsyncIterator[FeaturePull]) -> AsyncIterator[PulledFeatures]:
        """Answers one stream until its client ends it.

        Raises:
            InvalidArgumentError: of the first request that can't be answered.
            UnavailableError: the service stops.
        """
        inbox: asyncio.Queue[_Item] = asyncio.Queue(1)
        self._inboxes.add(inbox)
        reader = asyncio.create_task(_read(pulls, inbox))
        try:
            while (pull := await inbox.get()) is not None:
                if isinstance(pull, Exception):
                    raise pull
                yield await self._answer(pull)
        finally:
            reader.cancel()
            self._inboxes.discard(inbox)

    def end(self) -> None:
        """Ends all streams: the service stops."""
        for inbox in self._inboxes:
            while not inbox.empty():
                inbox.get_nowait()
            inbox.put_nowait(UnavailableError("the verifier is stopping; its sequences and their features are elsewhere soon"))

    async def _answer(self, pull: FeaturePull) -> PulledFeatures:
        started_ns = time.monotonic_ns()
        if self._books.waits:
            pulled = await asyncio.to_thread(self._books.read, pull, self._max_bytes)
        else:
            pulled = self._books.read(pull, self._max_bytes)
        self._metrics.features.observe(time.monotonic_ns() - started_ns)
        return pulled


async def _read(pulls: AsyncIterator[FeaturePull], inbox: "asyncio.Queue[_Item]") -> None:
    """Passes requests on until the client ends the stream or one is wrong."""
    try:
        async for pull in pulls:
            await inbox.put(pull)
        await inbox.put(None)
    except Exception as error:
        await inbox.put(error)
