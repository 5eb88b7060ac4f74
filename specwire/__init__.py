"""Specwire: speculative decoding split into services; this package is the shared library and the client SDK."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specwire.client import (
        AsyncBatch,
        AsyncClient,
        AsyncTokenStream,
        Batch,
        BatchItem,
        Chat,
        Choice,
        Client,
        GenerationResult,
        Prompt,
        StreamEvent,
        TokenStream,
    )
    from specwire.errors import (
        AbortedError,
        CancelledError,
        DeadlineExceededError,
        FailedPreconditionError,
        InternalError,
        InvalidArgumentError,
        ResourceExhaustedError,
        SpecwireError,
        UnauthenticatedError,
        UnavailableError,
        UnreachableError,
        UnsupportedError,
    )
    from specwire.messages import SpecStats, TokenLogprobs, TokenOrigin, Usage
    from specwire.offline import LLM, CompletionOutput, Logprob, RequestOutput
    from specwire.sampling_params import SamplingParams
    from specwire.tls import TlsOptions

__all__ = [
    "LLM",
    "AbortedError",
    "AsyncBatch",
    "AsyncClient",
    "AsyncTokenStream",
    "Batch",
    "BatchItem",
    "CancelledError",
    "Chat",
    "Choice",
    "Client",
    "CompletionOutput",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "GenerationResult",
    "InternalError",
    "InvalidArgumentError",
    "Logprob",
    "Prompt",
    "RequestOutput",
    "ResourceExhaustedError",
    "SamplingParams",
    "SpecStats",
    "SpecwireError",
    "StreamEvent",
    "TlsOptions",
    "TokenLogprobs",
    "TokenOrigin",
    "TokenStream",
    "UnauthenticatedError",
    "UnavailableError",
    "UnreachableError",
    "UnsupportedError",
    "Usage",
]
_MODULES = {
    "LLM": "specwire.offline",
    "CompletionOutput": "specwire.offline",
    "Logprob": "specwire.offline",
    "RequestOutput": "specwire.offline",
    "SamplingParams": "specwire.sampling_params",
    "SpecStats": "specwire.messages",
    "TlsOptions": "specwire.tls",
    "TokenLogprobs": "specwire.messages",
    "TokenOrigin": "specwire.messages",
    "Usage": "specwire.messages",
}
"""Of names that are neither errors nor of specwire.client."""


def __getattr__(name: str) -> Any:
    """Loads the SDK when it is asked for: the services import this package without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "specwire.errors" if name.endswith("Error") else _MODULES.get(name, "specwire.client")
    return getattr(importlib.import_module(module), name)
