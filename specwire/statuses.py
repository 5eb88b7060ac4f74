"""Errors and gRPC statuses: which stands for which, at a server and at a client."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specwire import errors
from specwire.messages import ErrorStatus

logger = logging.getLogger(__name__)

NO_SUCH_METHOD = "Method not found!"
"""gRPC's own words where no such service is: other errors of this status have others."""
_RETRY_AFTER = "retry-after-ms"
_ANSWERED = "specwire-answered"
"""Of a service that says itself that it is unavailable: gRPC, and proxies, have the same status where nothing answered."""
_MAX_DETAILS_BYTES = 4 << 10
"""Half of what all headers of a status may have by default, in any language's gRPC."""
_LOST_STATUS = "Internal error from Core"
"""What grpcio says at the client in place of the status with which a server ended a stream, if a write was under way (grpc issue 36066)."""
_CORE, _FAILED_WRITE = "grpc._cython.cygrpc", "SendMessageOperation"
_CODES = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CancelledError: grpc.StatusCode.CANCELLED,
    errors.AbortedError: grpc.StatusCode.ABORTED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
_ERRORS = {code: error for error, code in _CODES.items()}
_ERRORS_BY_NUMBER = {code.value[0]: error for code, error in _ERRORS.items()}


def status_code(error: BaseException) -> grpc.StatusCode:
    """The status that a Specwire error becomes; anything else is INTERNAL."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def error_from_rpc(error: grpc.aio.AioRpcError | grpc.RpcError) -> errors.SpecwireError:
    """The Specwire error that a status stands for, with the server's message."""
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
        return errors.UnavailableError("the other side ended the stream while something was being sent")
    kind = _ERRORS.get(error.code(), errors.InternalError)
    metadata: Any = error.trailing_metadata() or ()
    numbers = [int(value) for key, value in metadata if key == _RETRY_AFTER and str(value).isdecimal()]
    return kind(error.details() or error.code().name, retry_after_ms=numbers[0] if numbers else None)


def is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether a service of Specwire itself said that it is unavailable."""
    metadata: Any = error.trailing_metadata() or ()
    return any(key == _ANSWERED for key, _ in metadata)


def error_from_status(status: ErrorStatus) -> errors.SpecwireError:
    """The Specwire error that a failed request of a stream stands for."""
    return _ERRORS_BY_NUMBER.get(status.code, errors.InternalError)(status.message, retry_after_ms=status.retry_after_ms)


def hide_disconnects() -> None:
    """A client that leaves while something is written to it is no error. gRPC logs it as one, with a traceback, outside of all servicers."""
    logging.getLogger(_CORE).addFilter(_is_no_disconnect)


def _is_no_disconnect(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, grpc.aio.InternalError) or _FAILED_WRITE not in str(error):
        return True
    logger.debug("a client left while something was written to it: %s", error)
    return False


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """The one place where exceptions become statuses. Unexpected ones are logged whole and answered INTERNAL."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        # A single request is read inside the guard, since gRPC would answer bytes that are none with UNKNOWN and a traceback in the log. The
        # requests of a stream are read by the behaviour itself.
        read = _as_it_is if handler.request_streaming else handler.request_deserializer
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            behaviour = _guard_stream(handler.stream_stream or handler.unary_stream, read, handler_call_details.method)
        else:
            make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
            behaviour = _guard_unary(handler.stream_unary or handler.unary_unary, read, handler_call_details.method)
        deserializer = handler.request_deserializer if handler.request_streaming else None
        return make(behaviour, request_deserializer=deserializer, response_serializer=handler.response_serializer)


def shorten(details: str, max_bytes: int = _MAX_DETAILS_BYTES) -> str:
    """A status message that a header can carry: messages quote what the caller has sent, and that may be long."""
    num_bytes = 0
    for position, character in enumerate(details):
        # gRPC sends all but plain ASCII as %XX for each byte.
        num_bytes += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode(errors="replace"))
        if num_bytes > max_bytes:
            return f"{details[:position]} ..."
    return details


def _as_it_is(request: Any) -> Any:
    return request


def _guard_unary(behaviour: Callable, read: Callable[[Any], Any], method: str) -> Callable:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(read(request), context)
        except Exception as error:
            await _abort(error, context, method)

    return guarded


def _guard_stream(behaviour: Callable, read: Callable[[Any], Any], method: str) -> Callable:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(read(request), context):
                yield response
        except Exception as error:
            await _abort(error, context, method)

    return guarded


async def _abort(error: Exception, context: grpc.aio.ServicerContext, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, DecodeError):
        error = errors.InvalidArgumentError(f"a message could not be read ({error}); send one that is encoded as the service's .proto files say")
    if isinstance(error, errors.SpecwireError):
        metadata = [] if error.retry_after_ms is None else [(_RETRY_AFTER, str(error.retry_after_ms))]
        if isinstance(error, errors.UnavailableError):
            metadata.append((_ANSWERED, "1"))
        await context.abort(status_code(error), shorten(str(error)), tuple(metadata))
    logger.error("unexpected error in %s", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__} in {method}; the service's log has the details")
