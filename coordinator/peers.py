"""What the coordinator needs of the services that it drives. rpc.py has it over gRPC; tests have it inside one process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from specwire.errors import InternalError, UnavailableError
from specwire.messages import DraftResult, DraftRound, ServiceDescription, TokenizerSpec, VerifyResult, VerifyRound, Welcome

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)
Opened = TypeVar("Opened", covariant=True)
Answer = TypeVar("Answer")

_ANSWER_S = 10.0
"""What a peer may take to answer while it is being connected."""


class Stream(Protocol, Generic[Sent, Received]):
    """One long-lived stream of rounds."""

    def send(self, message: Sent) -> None:
        """Queues a message; never blocks or raises: what goes wrong is raised by `receive`."""

    async def receive(self) -> Received:
        """The peer's next message; raises a SpecwireError once the stream has ended."""

    def close(self) -> None:
        """Ends the stream at once."""


class Peer(Protocol, Generic[Opened]):
    """A verifier or drafter at an address."""

    async def describe(self) -> ServiceDescription:
        """Waits for the peer to be there. Raises a SpecwireError if it refuses."""

    def open_stream(self) -> Opened:
        """A new stream; nothing is sent yet."""

    async def close(self) -> None:
        """Drops the connection."""


class VerifierPeer(Peer[Stream[VerifyRound, VerifyResult]], Protocol):
    """A verifier, which also hands out the target's tokenizer."""

    async def get_tokenizer(self) -> TokenizerSpec:
        """The target's tokenizer."""


VerifyStream = Stream[VerifyRound, VerifyResult]
DraftStream = Stream[DraftRound, DraftResult]
DrafterPeer = Peer[DraftStream]
VerifierFactory = Callable[[str, int, str], VerifierPeer]
"""(address, most bytes of a message, the host name that it was found by or "") -> the verifier there."""
DrafterFactory = Callable[[str, int, str], DrafterPeer]


async def answer_in_time(answer: Awaitable[Answer], to: str) -> Answer:
    """A connecting peer's answer. Raises UnavailableError once it took too long: the peer is not there, or hangs."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await answer
    except TimeoutError:
        raise UnavailableError(f"it did not answer {to} within {_ANSWER_S:g} s; it is not there, or hangs") from None


async def greet(stream: Stream[Sent, VerifyResult | DraftResult], opening: Sent, instance_id: str) -> Welcome:
    """Opens a stream with a round that has `hello`.

    Args:
        instance_id: of the process that has described itself.

    Raises:
        UnavailableError: no answer as above, or another process answers than the one that was accepted, which may have other weights.
        InternalError: it answers something else.
    """
    stream.send(opening)
    welcome = (await answer_in_time(stream.receive(), "the hello of a stream")).welcome
    if welcome is None:
        raise InternalError("its first reply has no welcome")
    if welcome.instance_id != instance_id:
        text = f"process {welcome.instance_id or 'without a name'} has answered, but {instance_id or 'one without a name'} was described"
        raise UnavailableError(f"{text}: it was started anew, or a balancer stands before several; name each by its own address")
    return welcome
