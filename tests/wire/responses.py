"""Answers of the calls that the SDK does not make."""

from specwire.messages import ChoiceDelta, ErrorStatus
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import generate


def unpack_response(message: pb.GenerateResponse) -> list[ChoiceDelta]:
    return [generate.unpack_choice(choice) for choice in message.choices]


def unpack_batch_response(message: pb.GenerateBatchResponse) -> tuple[int, list[ChoiceDelta], ErrorStatus | None]:
    error = message.error
    status = ErrorStatus(error.code, error.message, error.retry_after_ms if error.HasField("retry_after_ms") else None)
    return message.index, [generate.unpack_choice(choice) for choice in message.choices], status if message.HasField("error") else None
