"""What reading features took."""

from collections import Counter
from typing import NamedTuple

from specwire.metrics import STEP_BOUNDS, Histogram

MEMORY, GRPC = "memory", "grpc"
PATHS = (MEMORY, GRPC)
"""Ways to a verifier's features, as metrics call them."""
READ, GONE, FAILED = "read", "gone", "failed"
OUTCOMES = (READ, GONE, FAILED)
"""What becomes of a span: it is read; its sequence has left the verifier; the verifier could not be read."""


class Reading(NamedTuple):
    """From the first to the last read of a round, in Unix nanoseconds."""

    started_ns: int
    finished_ns: int
    num_bytes: int


class FeatureCounts:
    """Since the start; the worker's thread counts, others look on.

    Attributes:
        num_spans: by way and outcome.
        num_bytes: by way.
        seconds: of whole reads (all sequences of a verifier at once), by way.
        num_unshared: verifiers whose memory could not be read though they offer it.
    """

    def __init__(self) -> None:
        self.num_spans: Counter[tuple[str, str]] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.seconds = {path: Histogram(STEP_BOUNDS) for path in PATHS}
        self.num_unshared = 0
        self._reading: Reading | None = None

    def read(self, path: str, num_read: int, num_gone: int, num_bytes: int, started_ns: int, finished_ns: int) -> None:
        """A read has ended; Unix nanoseconds, whose clock may be set meanwhile."""
        self.num_spans[path, READ] += num_read
        self.num_spans[path, GONE] += num_gone
        self.num_bytes[path] += num_bytes
        self.seconds[path].observe(max(0, finished_ns - started_ns))
        before = self._reading
        self._reading = Reading(before.started_ns if before else started_ns, finished_ns, num_bytes + (before.num_bytes if before else 0))

    def failed(self, path: str, num_spans: int) -> None:
        """These could not be read."""
        self.num_spans[path, FAILED] += num_spans

    def take_reading(self) -> Reading | None:
        """All reads since the last call, if there were any."""
        reading, self._reading = self._reading, None
        return reading
