"""Errors that a caller can act on: each message names the value, the limit and the remedy."""


class SpecwireError(Exception):
    """Base of every error that Specwire raises on purpose.

    Args:
        message: the value, the limit and the remedy.
        retry_after_ms: when the same request may succeed, if the error is about the moment and not about the request.
    """

    def __init__(self, message: str = "", *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class InvalidArgumentError(SpecwireError, ValueError):
    """A value that the caller sent is wrong (gRPC INVALID_ARGUMENT)."""


class FailedPreconditionError(SpecwireError):
    """The request is well-formed, but the service cannot take it in its present state (FAILED_PRECONDITION)."""


class ResourceExhaustedError(SpecwireError):
    """A queue, a message size or a memory bound is reached (RESOURCE_EXHAUSTED)."""


class UnauthenticatedError(SpecwireError):
    """The caller's API key is missing, unknown or expired (UNAUTHENTICATED)."""


class UnavailableError(SpecwireError):
    """A service that is needed is not there now; trying again later can help (UNAVAILABLE)."""


class UnreachableError(UnavailableError):
    """Nothing answers at the address, or something else than the service that is needed."""


class UnsupportedError(SpecwireError):
    """A feature that this build refuses by name (UNIMPLEMENTED)."""


class DeadlineExceededError(SpecwireError, TimeoutError):
    """The caller's deadline passed (DEADLINE_EXCEEDED)."""


class CancelledError(SpecwireError):
    """The caller or the server cancelled the request (CANCELLED)."""


class AbortedError(SpecwireError):
    """Another session took over what this one held (ABORTED)."""


class InternalError(SpecwireError):
    """Something that only a fault in Specwire or in the model's numbers explains (INTERNAL)."""
