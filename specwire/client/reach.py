"""What a client says of a coordinator that can't be reached, or that answered that it is not available."""

from specwire.errors import UnavailableError, UnreachableError
from specwire.tls import explain_handshake


def explain(error: UnavailableError, address: str) -> UnavailableError:
    """The error of a call with the coordinator's address; with a remedy, unless the coordinator itself has answered and named one."""
    if not isinstance(error, UnreachableError):
        return UnavailableError(f"the coordinator at {address} answered: {error}", retry_after_ms=error.retry_after_ms)
    remedy = explain_handshake(str(error)) or "is it running there?"
    return UnreachableError(f"the coordinator at {address} can't be reached ({error}); {remedy}")
