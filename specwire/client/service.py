"""What a client asks of the coordinator beside generations: whether it serves, and what it does."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from specwire.client.attempts import Attempts
from specwire.client.generation import Deadline
from specwire.client.reach import explain
from specwire.client.rpc import fetch_status, send_canary
from specwire.errors import DeadlineExceededError, UnavailableError
from specwire.messages import CanaryAction, CoordinatorStatus, VariantStatus
from specwire.rpc import wait_serving, watch_serving

_RENEWAL_S = 10.0


async def read_status(attempts: Attempts, timeout_s: float) -> CoordinatorStatus:
    """See AsyncClient.get_status."""
    Deadline(timeout_s)  # says now what is wrong with it
    with _named(attempts.address, timeout_s):
        return await fetch_status(attempts.connect().channel, timeout_s)


async def set_canary(attempts: Attempts, action: CanaryAction, share: float, config: str, timeout_s: float) -> tuple[VariantStatus, ...]:
    """See AsyncClient.set_canary."""
    Deadline(timeout_s)  # says now what is wrong with it
    with _named(attempts.address, timeout_s):
        return await send_canary(attempts.connect().channel, action, share, config, timeout_s)


@contextlib.contextmanager
def _named(address: str, timeout_s: float) -> Iterator[None]:
    """Errors of a call name the coordinator."""
    try:
        yield
    except UnavailableError as error:
        raise explain(error, address) from None
    except DeadlineExceededError:
        raise DeadlineExceededError(f"the coordinator at {address} did not answer within {timeout_s:g} s; it may hang") from None


async def wait_ready(attempts: Attempts, timeout_s: float) -> None:
    """See AsyncClient.wait_ready."""
    Deadline(timeout_s)  # says now what is wrong with it
    connection = attempts.connect()
    try:
        async with asyncio.timeout(timeout_s):
            await wait_serving(connection.channel)
    except TimeoutError:
        place = f"the coordinator at {attempts.address} does not serve after {timeout_s:g} s"
        text = f"{place}; is it running there, and do both sides use TLS, or neither? its log says what it waits for"
        raise UnavailableError(text) from None


async def watch(attempts: Attempts) -> AsyncGenerator[bool, None]:
    """See AsyncClient.watch_serving."""
    serves = False
    while True:
        channel = await attempts.connect().renewed_channel()
        async with contextlib.aclosing(watch_serving(channel)) as changes:
            # One that can't be reached may be so for want of new certificates.
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(None if serves else _RENEWAL_S):
                        serves = await anext(changes)
                    yield serves
