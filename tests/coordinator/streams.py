"""What tests of streams have in common: requests, and what a client makes of a session."""

from collections import defaultdict

from coordinator.stream import SessionStream
from specwire.messages import ChoiceDelta, ErrorStatus, GenerateRequest, SessionUpdate
from specwire.sampling_params import SamplingParams

MANY_BYTES, MANY_REQUESTS = 1 << 25, 4096


def request(last: int = 0, *, timeout_ms: int | None = None, **sampling: object) -> GenerateRequest:
    return GenerateRequest([5, last], SamplingParams(**sampling), timeout_ms=timeout_ms)


async def collect(session: SessionStream) -> list[SessionUpdate]:
    return [update async for update in session.updates()]


class Gathered:
    """What a client makes of a session's updates."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.origins: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self.ends: dict[tuple[int, int], ChoiceDelta] = {}
        self.errors: dict[int, ErrorStatus] = {}
        self.done: list[int] = []

    def add(self, update: SessionUpdate) -> "Gathered":
        for stream_id, index, token_ids, origins in update.deltas:
            assert (stream_id, index) not in self.ends
            self.tokens[stream_id, index] += token_ids
            self.origins[stream_id, index] += origins
        for event in update.events:
            assert event.stream_id not in self.done
            if event.choice is not None:
                key = event.stream_id, event.choice.index
                assert key not in self.ends
                self.tokens[key] += event.choice.token_ids
                self.origins[key] += event.choice.token_origins
                if event.choice.finish_reason is not None:
                    self.ends[key] = event.choice
            if event.error is not None:
                self.errors[event.stream_id] = event.error
            if event.done:
                self.done.append(event.stream_id)
        return self
