"""The client SDK: text or token ids in, text and token ids out, from a coordinator's address alone."""

from specwire.client.aio import AsyncClient
from specwire.client.batch import AsyncBatch
from specwire.client.prompts import BatchItem, Chat, Prompt
from specwire.client.results import Choice, GenerationResult, StreamEvent
from specwire.client.stream import AsyncTokenStream
from specwire.client.sync import Batch, Client, TokenStream
from specwire.config import DEFAULT_ADDRESS

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncBatch",
    "AsyncClient",
    "AsyncTokenStream",
    "Batch",
    "BatchItem",
    "Chat",
    "Choice",
    "Client",
    "GenerationResult",
    "Prompt",
    "StreamEvent",
    "TokenStream",
]
