"""The client SDK: text or token ids in, text and token ids out, from a coordinator's address alone."""

from specwire.client.aio import DEFAULT_ADDRESS, AsyncClient
from specwire.client.results import Choice, GenerationResult, StreamEvent
from specwire.client.stream import AsyncTokenStream
from specwire.client.sync import Client, TokenStream

__all__ = ["DEFAULT_ADDRESS", "AsyncClient", "AsyncTokenStream", "Choice", "Client", "GenerationResult", "StreamEvent", "TokenStream"]
