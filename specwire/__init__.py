"""Specwire: speculative decoding split into services; this package is the shared library and the client SDK."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specwire.client import (
        AsyncBatch,
        AsyncClient,
        AsyncTokenStream,
        Batch,
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
        UnavailableError,
        UnsupportedError,
    )
    from specwire.messages import SpecStats, TokenLogprobs, TokenOrigin, Usage
    from specwire.sampling_params import SamplingParams

__all__ = [
    "AbortedError",
    "AsyncBatch",
    "AsyncClient",
    "AsyncTokenStream",
    "Batch",
    "CancelledError",
    "Chat",
    "Choice",
    "Client",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "GenerationResult",
    "InternalError",
    "InvalidArgumentError",
    "Prompt",
    "ResourceExhaustedError",
    "SamplingParams",
    "SpecStats",
    "SpecwireError",
    "StreamEvent",
    "TokenLogprobs",
    "TokenOrigin",
    "TokenStream",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
]
_MESSAGES = ("SpecStats", "TokenLogprobs", "TokenOrigin", "Usage")


def __getattr__(name: str) -> Any:
    """Loads the SDK when it is asked for: the services import this package without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "SamplingParams":
        module = "specwire.sampling_params"
    elif name.endswith("Error"):
        module = "specwire.errors"
    else:
        module = "specwire.messages" if name in _MESSAGES else "specwire.client"
    return getattr(importlib.import_module(module), name)
