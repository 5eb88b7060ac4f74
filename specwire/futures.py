"""Futures that may fail with nobody there to see it."""

import asyncio
from typing import TypeVar

Value = TypeVar("Value")


def unwatched(future: "asyncio.Future[Value]") -> "asyncio.Future[Value]":
    """The same future; if it fails and nobody waits for it any more, asyncio does not log its error as one that was forgotten."""
    future.add_done_callback(_see)
    return future


def _see(future: "asyncio.Future[Value]") -> None:
    if not future.cancelled():
        future.exception()
