"""What a client asks of the coordinator beside generations: whether it serves, and what it does."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from specwire.client.attempts import Attempts
from specwire.client.generation import Deadline
from specwire.client.rpc import fetch_status
from specwire.errors import DeadlineExceededError, UnavailableError
from specwire.messages import CoordinatorStatus
from specwire.rpc import wait_serving, watch_serving
from specwire.tls import explain_handshake

_RENEWAL_S = 10.0


async def read_status(attempts: Attempts, timeout_s: float) -> CoordinatorStatus:
    """See AsyncClient.get_status."""
    Deadline(timeout_s)  # says now what is wrong with it
    try:
        return await fetch_status(attempts.connect().channel, timeout_s)
    except UnavailableError as error:
        remedy = explain_handshake(str(error)) or "is it running there?"
        raise UnavailableError(f"the coordinator at {attempts.address} can't be reached ({error}); {remedy}") from None
    except DeadlineExceededError:
        raise DeadlineExceededError(f"the coordinator at {attempts.address} did not answer within {timeout_s:g} s; it may hang") from None


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
