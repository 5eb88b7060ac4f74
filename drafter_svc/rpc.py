"""Features over gRPC: a stream to a verifier on a connection of its own, so that rounds never wait behind features."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import grpc
import torch

from specwire.engine.heads.source import FeatureSource
from specwire.errors import InternalError, SpecwireError, UnavailableError
from specwire.messages import FeaturePull, FeatureRange, PulledFeatures, RowStatus
from specwire.rpc import open_sync_channel
from specwire.statuses import error_from_rpc
from specwire.tls import TlsOptions
from specwire.v1 import verifier_pb2 as pb
from specwire.v1 import verifier_pb2_grpc
from specwire.wire import features

if TYPE_CHECKING:
    from .features import FeaturePath, Located

_TIMEOUT_S = 1.0
"""For all answers of one read: a step does not wait that long for drafts anyway."""
_MAX_ANSWER_BYTES = 1 << 20
"""Of features: larger messages take more time a byte, and gRPC's own limit is near."""


def make_connect(source: FeatureSource, max_message_bytes: int, tls: TlsOptions | None) -> "Callable[[str, str], FeaturePath]":
    """What makes ways over gRPC for one head."""

    def connect(address: str, server_name: str) -> "FeaturePath":
        return PulledStream(address, server_name, source, max_message_bytes, tls)

    return connect


class PulledStream:
    """See `FeaturePath`. The stream is opened by the first read, and anew by the read after one that failed.

    Args:
        address: of the verifier.
        server_name: the host name that stands for it, if it was looked up.
        source: which features.
        max_message_bytes: most bytes of an answer.
        tls: None = without.
        timeout_s: for all answers of a read.
    """

    def __init__(
        self,
        address: str,
        server_name: str,
        source: FeatureSource,
        max_message_bytes: int,
        tls: TlsOptions | None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._address, self._server_name, self._tls = address, server_name, tls
        self._source = source
        self._bytes_per_token = source.width * source.dtype.itemsize
        self._max_message_bytes = max_message_bytes
        self._tokens_per_pull = max(1, min(_MAX_ANSWER_BYTES, max_message_bytes // 2) // self._bytes_per_token)
        self._timeout_s = timeout_s
        self._call: _Call | None = None

    def read(self, spans: Sequence["Located"]) -> list[torch.Tensor | None]:
        """See `FeaturePath.read`."""
        pieces = list(_pieces(spans, self._tokens_per_pull))
        pulls = [[one for _, one in group] for group in _groups(pieces, self._tokens_per_pull)]
        try:
            if self._call is None:
                self._call = _Call(self._address, self._server_name, self._max_message_bytes, self._tls)
            answers = self._call.ask([FeaturePull(self._source.hash, ranges) for ranges in pulls], self._timeout_s)
            parts = [part for ranges, answer in zip(pulls, answers, strict=True) for part in self._split(ranges, answer)]
        except SpecwireError:
            self.close()
            raise
        found: list[list[torch.Tensor | None]] = [[] for _ in spans]
        for (index, _), part in zip(pieces, parts, strict=True):
            found[index].append(part)
        return [_joined(ones) for ones in found]

    def close(self) -> None:
        """See `FeaturePath.close`."""
        if self._call is not None:
            self._call.close()
            self._call = None

    def _split(self, ranges: Sequence[FeatureRange], answer: PulledFeatures) -> list[torch.Tensor | None]:
        """An answer's features by range; None for a sequence that is not there any more."""
        if len(answer.statuses) != len(ranges) or RowStatus.BAD in answer.statuses:
            raise InternalError(f"{len(ranges)} ranges of features were answered {[status.name for status in answer.statuses]}")
        counts = [one.num_positions if status is RowStatus.OK else 0 for one, status in zip(ranges, answer.statuses, strict=True)]
        if len(answer.data) != sum(counts) * self._bytes_per_token:
            raise InternalError(f"{sum(counts)} features of {self._bytes_per_token} bytes were asked for, but {len(answer.data)} bytes came")
        data = torch.frombuffer(bytearray(answer.data), dtype=self._source.dtype) if answer.data else torch.zeros(0, dtype=self._source.dtype)
        rows = data.view(-1, self._source.width)
        ends = list(accumulate(counts))
        return [rows[end - count : end] if count else None for count, end in zip(counts, ends, strict=True)]


class _Call:
    """One stream. A thread waits for its answers, since a caller of its own accord waits for ever."""

    def __init__(self, address: str, server_name: str, max_message_bytes: int, tls: TlsOptions | None) -> None:
        self._channel = open_sync_channel(address, max_message_bytes, server_name, tls=tls)
        self._requests: queue.SimpleQueue[pb.PullFeaturesRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.PullFeaturesResponse | SpecwireError] = queue.SimpleQueue()
        requests: Iterator[pb.PullFeaturesRequest] = iter(self._requests.get, None)
        self._call = verifier_pb2_grpc.VerifierServiceStub(self._channel).PullFeatures(requests)
        threading.Thread(target=self._receive, name="features", daemon=True).start()

    def ask(self, pulls: Sequence[FeaturePull], timeout_s: float) -> list[PulledFeatures]:
        """The answers, in order. After an error the stream is of no more use.

        Raises:
            SpecwireError: what the stream ended with; UnavailableError if they did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        for pull in pulls:
            self._requests.put(features.pack_pull(pull))
        answers = []
        for _ in pulls:
            try:
                item = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise UnavailableError(f"its features did not come within {timeout_s:g} s") from None
            if isinstance(item, SpecwireError):
                raise item
            answers.append(features.unpack_pulled(item))
        return answers

    def close(self) -> None:
        """Ends the stream and its threads."""
        self._requests.put(None)
        self._call.cancel()
        self._channel.close()

    def _receive(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(UnavailableError("the verifier ended the stream of features"))
        except grpc.RpcError as error:
            self._answers.put(error_from_rpc(error))


def _pieces(spans: Sequence["Located"], most: int) -> Iterator[tuple[int, FeatureRange]]:
    """The spans in ranges of at most so many positions, each with the number of its span."""
    for index, span in enumerate(spans):
        for first in range(span.first, span.first + span.num_positions, most):
            yield index, FeatureRange(span.generation, first, min(most, span.first + span.num_positions - first))


def _groups(pieces: Sequence[tuple[int, FeatureRange]], most: int) -> Iterator[list[tuple[int, FeatureRange]]]:
    """Consecutive ranges whose positions add up to at most so many."""
    group: list[tuple[int, FeatureRange]] = []
    num_positions = 0
    for piece in pieces:
        if group and num_positions + piece[1].num_positions > most:
            yield group
            group, num_positions = [], 0
        group.append(piece)
        num_positions += piece[1].num_positions
    if group:
        yield group


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """A span of its pieces; None unless all are there."""
    there = [part for part in parts if part is not None]
    if not parts or len(there) < len(parts):
        return None
    return there[0] if len(there) == 1 else torch.cat(there)
